"""Changes to other people's modules and classes, for as long as a context lasts."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Generator[None]:
    """Set `owner.name`, which may be inherited, to `value` in this context."""
    own = name in vars(owner)
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
