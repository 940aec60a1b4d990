"""Reads values of enumerations that a newer version may have added.

In reports, such a field has a member for unknown values (`or_else`) with the safest meaning: it never ends
anything. Only `frames` reads so; messages made by this version have known values.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

FROM_ANOTHER_VERSION: Final = {"from_another_version": True}
"""The validation context of a message that another version may have written."""


def or_else(other: str) -> WrapValidator:
    """A validator that reads a text that is not a value of the enumeration as `other`."""

    def read(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError:
            if info.context is FROM_ANOTHER_VERSION and isinstance(value, str):
                return handler(other)
            raise

    return WrapValidator(read)
