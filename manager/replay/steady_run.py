"""A stretch of steps at one speed, in closed form: nobody plays the steps one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyRun:
    """What a formed generation does from `began_ns` on, as long as nothing happens to it. Whole nanoseconds.

    Steps take `step_ns` each; the first one `ahead_ns` less, if it is the rest of one. After `first` steps,
    and then after each `every` more, training waits `stall_ns` for a snapshot; its checkpoint exists
    `publish_ns` after it was begun. `at_once`: one is taken before the first step.
    """

    began_ns: int
    first_step: int
    """Steps that were committed when it began."""
    step_ns: int
    first: int
    every: int
    stall_ns: int
    publish_ns: int
    at_once: bool = False
    ahead_ns: int = 0
    """Negative if the rest of the step takes longer than the whole would."""

    def snapshots_before(self, steps: int) -> int:
        """How many snapshots were taken, and waited for, when the step after `steps` others begins."""
        return self.at_once + (1 + (steps - self.first) // self.every if steps >= self.first else 0)

    def ends_ns(self, steps: int) -> int:
        """When `steps` steps are done; a snapshot that is due then comes after."""
        worked_ns = steps * self.step_ns - self.ahead_ns if steps else 0
        return self.began_ns + worked_ns + self._stalls_up_to(steps) * self.stall_ns

    def _stalls_up_to(self, steps: int) -> int:
        """How many snapshots were waited for before the last of `steps` steps began."""
        return self.snapshots_before(steps - 1) if steps > 0 else 0

    def steps_at(self, now_ns: int) -> int:
        """How many steps are done."""
        left = now_ns - self.began_ns + self.ahead_ns - self.at_once * self.stall_ns
        if left < self.first * self.step_ns:
            return max(0, left // self.step_ns)
        left -= self.first * self.step_ns
        cycles, left = divmod(left, self.stall_ns + self.every * self.step_ns)
        return self.first + cycles * self.every + max(0, left - self.stall_ns) // self.step_ns

    def next_end_ns(self, now_ns: int) -> int:
        """When the step that is under way, or the next one, will be done."""
        return self.ends_ns(self.steps_at(now_ns) + 1)

    def stalled_ns(self, now_ns: int) -> int:
        """How much of the time until now went into waiting for snapshots."""
        steps = self.steps_at(now_ns)
        whole = self._stalls_up_to(steps)
        since = now_ns - self.ends_ns(steps)
        waited = min(since, self.stall_ns * (self.snapshots_before(steps) - whole))
        return whole * self.stall_ns + waited

    def under_way_ns(self, now_ns: int) -> int:
        """For how long the step under way has been worked at, stalls apart."""
        steps = self.steps_at(now_ns)
        worked_ns = steps * self.step_ns - self.ahead_ns if steps else 0
        return now_ns - self.began_ns - worked_ns - self.stalled_ns(now_ns)

    def newest_published(self, now_ns: int) -> int | None:
        """After how many steps the newest checkpoint was taken that exists by now; None: there is none.

        Uploads go one after another: while one takes longer than the time between two snapshots, those that
        would be taken meanwhile are put off until there is room, here to the next that is due.
        """
        uploaded = self.num_published(now_ns)
        if not uploaded:
            return None
        number = (uploaded - 1) * self._spacing - self.at_once
        return 0 if number < 0 else self.first + number * self.every

    def num_published(self, now_ns: int) -> int:
        """How many checkpoints of this stretch exist, or existed and were retired since."""
        done_ns = now_ns - self.publish_ns
        if done_ns < self.began_ns:
            return 0
        return -(-self.snapshots_before(self.steps_at(done_ns)) // self._spacing)

    @property
    def _spacing(self) -> int:
        """Of this many snapshots that are due, one is taken."""
        cycle_ns = self.stall_ns + self.every * self.step_ns
        return max(1, -(-self.publish_ns // cycle_ns))
