"""Values that a newer side may add to those of an enumeration, read by a side that does not know them.

Where a message tells what is, the field has a member for them (`or_else`), whose meaning is the safest:
nothing follows from it that ends anything. Only `frames` reads so; what is made here has values that this
version knows.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

FROM_ANOTHER_VERSION: Final = {"from_another_version": True}
"""The validation context of a message that another version may have written."""


def or_else(other: str) -> WrapValidator:
    """Mark an enumeration: a text that is none of its values is read as `other`."""

    def read(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError:
            if info.context is FROM_ANOTHER_VERSION and isinstance(value, str):
                return handler(other)
            raise

    return WrapValidator(read)
