"""Where a replayed job's time went: every nanosecond of it is one item's, and no other's."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .steady_run import SteadyRun


class Item(StrEnum):
    """What a job's time can go into. The first is what goodput counts."""

    USEFUL = "useful"  # steps that count in the end
    SNAPSHOT = (
        "snapshot"  # waiting for copies to host memory, and for the checkpoint before a hold or the end
    )
    LOST = "lost"  # steps that were committed and had to be done again
    CUT_OFF = "cut_off"  # what was done of steps that a death broke off, and had to be done again
    UNFINISHED = "unfinished"  # the step under way when the replay ends
    DETECT = "detect"  # dead, but not known to be
    DECIDE = "decide"
    PREPARE = "prepare"
    OPEN = "open"
    FORM = "form"
    START = "start"  # until the first plan: booting, importing, profiling
    WAIT = "wait"  # too few VMs for any plan, or trainers of new ones still starting


@dataclass
class TimeAccount:
    """The items of one replay, in nanoseconds, and the steps that were done."""

    now_ns: int
    items: dict[Item, int] = field(default_factory=lambda: dict.fromkeys(Item, 0))
    steps: int = 0
    num_lost: int = 0
    num_cut_off: int = 0
    num_published: int = 0
    idle_ns: int = 0
    """Time without steps since the last stretch ended."""
    _in_flight_ns: int = 0
    """Time that earlier stretches have put into the step under way."""
    _done: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # (steps, ns of each), oldest first

    def idle(self, item: Item, until_ns: int) -> None:
        """Nothing stepped since the last entry; `item` says why."""
        spent = until_ns - self.now_ns
        self.items[item] += spent
        self.idle_ns += spent
        self.now_ns = until_ns

    def stepped(self, stretch: SteadyRun, until_ns: int, *, rest: Item) -> int:
        """A stretch went on until now; `rest` says what came of the step under way. Its steps."""
        assert self.now_ns == stretch.began_ns, "a stretch follows on what came before it"
        steps = stretch.steps_at(until_ns)
        left = stretch.under_way_ns(until_ns)
        if steps:
            self._do(1, stretch.step_ns - stretch.ahead_ns + self._saved(stretch.ahead_ns))
            self._do(steps - 1, stretch.step_ns)
        self.items[Item.SNAPSHOT] += stretch.stalled_ns(until_ns)
        self._in_flight_ns += left
        self.num_cut_off += rest is Item.CUT_OFF and left > 0
        if rest is not Item.CUT_OFF:
            self.give_up(rest)
        self.num_published += stretch.num_published(until_ns)
        self.steps += steps
        self.now_ns, self.idle_ns = until_ns, 0
        return steps

    def give_up(self, item: Item) -> None:
        """Nothing counts of what was done of the step under way."""
        self.items[item] += self._in_flight_ns
        self._in_flight_ns = 0

    def _saved(self, ahead_ns: int) -> int:
        """The step in flight is done. What counts of the time that went into it before is by how much its
        rest was shorter than a step."""
        saved_ns = min(self._in_flight_ns, max(0, ahead_ns))
        self._in_flight_ns -= saved_ns
        self.give_up(Item.CUT_OFF)
        return saved_ns

    def _do(self, steps: int, each_ns: int) -> None:
        self.items[Item.USEFUL] += steps * each_ns
        if steps:
            self._done.append((steps, each_ns))

    def rewind(self, steps: int) -> int:
        """Training goes on from an earlier count of steps. How many were lost."""
        lost = left = self.steps - steps
        while left > 0:
            done, each_ns = self._done.pop()
            again = min(done, left)
            if done > again:
                self._done.append((done - again, each_ns))
            self.items[Item.USEFUL] -= again * each_ns
            self.items[Item.LOST] += again * each_ns
            left -= again
        self.steps = steps
        self.num_lost += lost
        return lost
