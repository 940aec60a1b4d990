"""A stand-in for `time` in which time passes by sleeping alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Pauses:
    """Time passes by sleeping alone."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list[float])

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
