"""Python's collector of reference cycles, in a process that keeps much and makes few cycles.

It begins anew after so many objects as were made and not freed, and now and then looks at all that there are.
A thousand reports that wait together for a decision are thirty thousand objects that nobody needs to look at.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000  # before the young are looked at; some 10 MB


@contextmanager
def rare_collections() -> Generator[None]:
    """Have the collector look for cycles rarely; as before at the end."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
