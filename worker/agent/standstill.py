"""How long an agent itself stood still: a bound on another's silence does not count the time in which the
agent could hear nobody."""

from __future__ import annotations

import asyncio
import time

PERIOD_S = 0.25
_STOOD_STILL_S = 4 * PERIOD_S  # who looks so late was itself suspended, or kept waiting


async def pause() -> float:
    """Wait for a period; seconds for which this process stood still meanwhile, 0 if it was hardly late."""
    before = time.monotonic()
    await asyncio.sleep(PERIOD_S)
    slept_s = time.monotonic() - before
    return slept_s - PERIOD_S if slept_s > _STOOD_STILL_S else 0.0
