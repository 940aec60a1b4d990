"""Measures how long the agent itself was suspended, since leases must not count that as others' silence."""

from __future__ import annotations

import asyncio
import time

PERIOD_S = 0.25
_STOOD_STILL_S = 4 * PERIOD_S  # a later wake-up means that this process was suspended or starved


async def pause() -> float:
    """Wait for a period; returns the seconds for which this process was suspended, 0 if hardly late."""
    before = time.monotonic()
    await asyncio.sleep(PERIOD_S)
    slept_s = time.monotonic() - before
    return slept_s - PERIOD_S if slept_s > _STOOD_STILL_S else 0.0
