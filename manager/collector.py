"""Settings of Python's garbage collector for a process that keeps many objects and makes few cycles.

The collector runs after a number of allocations without a free, and now and then traverses all objects. A
thousand reports that wait for a decision are thirty thousand objects, which it would traverse in vain.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000  # allocations before a collection of the young generation; some 10 MB


@contextmanager
def rare_collections() -> Generator[None]:
    """Make collections rare in this context."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
