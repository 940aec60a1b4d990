"""Delays between attempts."""

from __future__ import annotations


class Backoff:
    """Delays from `first_s` on, each twice as long as the one before, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """Begin again with the first delay, since an attempt has succeeded."""
        self._next_s = self._first_s
