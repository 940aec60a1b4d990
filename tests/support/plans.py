"""Plans of every shape for property tests, and a world of random delays that plays them."""

from __future__ import annotations

import itertools
import random

from hypothesis import strategies as st
from makara.pipeline import Dispatcher, Hop, Operation, Path, Plan, Range, Schedule, grid, orders, output_of

schedules = st.sampled_from(list(Schedule))
windows = st.none() | st.integers(1, 4)


def stages(depth: int) -> list[Range]:
    return [Range(stage, stage + 1) for stage in range(depth)]


@st.composite
def grids(draw: st.DrawFn, max_depth: int = 6, max_micro_batches: int = 12) -> Plan:
    """Straight P×D grids, D often not dividing N."""
    replicas = draw(st.integers(1, 3))
    depth = draw(st.integers(1, max_depth))
    schedule = draw(schedules)
    return grid(
        stages(depth),
        replicas,
        draw(st.integers(replicas, max_micro_batches)),
        schedule=schedule,
        window=draw(windows),
        recompute=draw(st.booleans()),
        frozen=draw(st.just(0) | st.integers(0, depth - 1)),
        halves=schedule is not Schedule.GPIPE and draw(st.booleans()),
    )


@st.composite
def crossing_plans(draw: st.DrawFn) -> Plan:
    """Paths of different depths that cross at workers, visit one twice, or stay on one for two hops."""
    num_sections = draw(st.integers(1, 6))
    num_workers = draw(st.integers(1, 4))
    num_micro_batches = draw(st.integers(1, 9))
    hops_of: list[tuple[Hop, ...]] = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, num_sections - 1)))) if num_sections > 1 else []
        bounds = [0, *cuts, num_sections]
        hops_of.append(
            tuple(
                Hop(draw(st.integers(0, num_workers - 1)), Range(start, stop))
                for start, stop in itertools.pairwise(bounds)
            )
        )
    path_of = [draw(st.integers(0, len(hops_of) - 1)) for _ in range(num_micro_batches)]
    ranges: list[Range] = []
    for worker in range(num_workers):
        spans = [hop.range for hops in hops_of for hop in hops if hop.worker == worker] or [Range(0, 1)]
        ranges.append(Range(min(span.start for span in spans), max(span.stop for span in spans)))
    schedule = draw(schedules)
    return Plan(
        num_sections=num_sections,
        num_micro_batches=num_micro_batches,
        ranges=tuple(ranges),
        paths=tuple(
            Path(hops, tuple(m for m, chosen in enumerate(path_of) if chosen == number))
            for number, hops in enumerate(hops_of)
        ),
        schedule=schedule,
        window=draw(windows),
        recompute=draw(st.booleans()),
        frozen=draw(st.just(0) | st.integers(0, num_sections - 1)),
        halves=schedule is not Schedule.GPIPE and draw(st.booleans()),
    )


class World:
    """Workers that ask their dispatchers, and channels that keep their order but delay as `draw` pleases."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        self.plan = plan
        self.draw = draw
        self.orders = orders(plan)
        self.dispatchers = [Dispatcher(plan, worker, order) for worker, order in enumerate(self.orders)]
        self.ran: list[list[Operation]] = [[] for _ in self.orders]
        self.running: dict[int, Operation] = {}
        self.channels: dict[tuple[int, int, str], list[Operation]] = {}
        self.delivered: dict[tuple[int, int, str], list[Operation]] = {}

    def play(self) -> None:
        """Until nothing runs and nothing is under way."""
        while True:
            for worker, dispatcher in enumerate(self.dispatchers):
                if worker not in self.running and (task := dispatcher.next()) is not None:
                    self.running[worker] = task
                    self.ran[worker].append(task)
            open_channels = [channel for channel, queue in self.channels.items() if queue]
            steps = [*self.running, *open_channels]
            if not steps:
                return
            step = self.draw.choice(steps)
            if isinstance(step, int):
                self.finish(step)
            else:
                self.deliver(step)

    def finish(self, worker: int) -> None:
        target = output_of(self.plan, self.running.pop(worker))
        if target is None:
            return
        peer, fed = target
        if peer == worker:
            self.dispatchers[worker].arrived(fed)
        else:
            self.channels.setdefault((worker, peer, fed.kind.value), []).append(fed)

    def deliver(self, channel: tuple[int, int, str]) -> None:
        fed = self.channels[channel].pop(0)
        self.delivered.setdefault(channel, []).append(fed)
        self.dispatchers[channel[1]].arrived(fed)
