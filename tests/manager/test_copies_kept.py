"""Jobs that ask for several copies of each section: whatever dies, and whenever, the store is not needed.

Deaths of up to f VMs (`resilience.tolerated_failures`) between two changes of plan, while (f+1) * n0 VMs live
(n0: the fewest that hold the model). The real core and the real planner in a simulated world, whose checks
say at each generation that the store is begun from when and only when a section has no host.
"""

from __future__ import annotations

import os
import random
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
from branching_world import BranchingWorld
from calibrations import FREE, uniform
from makara.morphing import stage_table
from makara.morphing.copies import least_vms
from makara.morphing.stages import Mode
from makara.simulator import Link

SLOW = Link(latency_s=0.0, bytes_per_s=1.0)
"""So slow that a reroute, for which nothing moves, does more than a new plan for a while."""


class Model(NamedTuple):
    """Sections, of which a worker has memory for some."""

    num_sections: int
    held: int

    def world(
        self, num_vms: int, tolerated: int, *, per_vm: int = 1, link: Link = FREE, **parallel: Any
    ) -> BranchingWorld:
        calibration = uniform(self.num_sections, inter_vm=link)
        table = stage_table(calibration)
        memory = max(
            table.memory(start, start + self.held, Mode(recompute=True)).least_bytes
            for start in range(self.num_sections - self.held + 1)
        )
        return BranchingWorld(
            calibration,
            num_vms=num_vms,
            per_vm=per_vm,
            training={"global_batch_size": 24, "steps": 100_000},
            resilience={"tolerated_failures": tolerated},
            resources={"min_nodes": 1, "device_memory": memory},
            parallelism=parallel,
        )


MODELS = {1: Model(2, 2), 2: Model(4, 2), 3: Model(3, 1), 4: Model(4, 1), 5: Model(5, 1)}
"""By n0, with one worker a VM."""


@pytest.mark.parametrize("link", [FREE, SLOW], ids=["new plans", "reroutes"])
@pytest.mark.parametrize(
    ("tolerated", "least"), [*((1, n0) for n0 in range(1, 6)), *((2, n0) for n0 in range(1, 4))]
)
def test_no_deaths_between_two_changes_of_plan_need_the_store(tolerated: int, least: int, link: Link) -> None:
    """Up to ten VMs: every set of up to f, in every order and at every instant that make a difference."""
    enough, seen = (tolerated + 1) * least, set[Hashable]()
    tried = rerouted = below = 0
    for num_vms in range(enough, 11):
        waiting = [(MODELS[least].world(num_vms, tolerated, link=link), tolerated)]
        assert n0(waiting[0][0]) == least
        while waiting:
            world, more = waiting.pop()
            if (key := (situation(world), more)) in seen:
                continue
            seen.add(key)
            for after, left in deaths(world, more):
                tried += 1
                assert set(after.rungs[1:]) <= {"peers"}, "the store was needed"
                assert after.state.running
                assert after.state.few_copies == (after.copies if after.copies <= tolerated else None)
                if len(after.vms) < enough:
                    assert after.state.enough_vms == enough
                    below += 1
                    continue
                if after.copies > tolerated:
                    waiting.append((after, tolerated))
                    continue
                rerouted += 1
                if left:
                    waiting.append((after.branch(), left))
                wait_for_the_next_plan(after)
                assert after.copies > tolerated
                assert after.state.few_copies is None
                waiting.append((after, tolerated))
    print(f"{tried} ways, {len(seen)} situations, {rerouted} reroutes, {below} times too few VMs")
    assert below > 0
    assert rerouted > 0 or link is FREE or least == 5


@pytest.mark.parametrize(("least", "num_vms"), [(2, 5), (3, 6)])
def test_more_deaths_need_the_store_when_a_section_has_no_host_and_only_then(
    least: int, num_vms: int
) -> None:
    """Two deaths where one is to be survived: `check_rung` looks at each generation that forms."""
    seen, rungs, few = set[Hashable](), set[str](), set[int | None]()
    waiting = [MODELS[least].world(num_vms, tolerated=1)]
    while waiting:
        world = waiting.pop()
        if (key := situation(world)) in seen:
            continue
        seen.add(key)
        for after, _ in deaths(world, 2):
            if len(after.vms) < least:
                assert not after.state.running
                continue
            assert after.state.running, "with fewer copies, but it goes on"
            rungs.update(after.rungs[1:])
            few.add(after.state.few_copies)
            waiting.append(after)
    assert rungs == {"peers", "store"}
    assert 1 in few


@pytest.mark.parametrize("per_vm", [1, 2])
@pytest.mark.parametrize("tolerated", [1, 2])
def test_random_deaths_and_repairs_of_many_vms_never_need_the_store(tolerated: int, per_vm: int) -> None:
    for seed in seeds(6):
        rng = random.Random(seed)
        model = Model(num_sections := rng.randint(3, 8), rng.randint(1, num_sections))
        num_vms, link = rng.randint(11, 20), rng.choice([FREE, SLOW])
        world = model.world(num_vms, tolerated, per_vm=per_vm, link=link)
        least = n0(world)
        assert least is not None
        enough, more = (tolerated + 1) * least, tolerated
        if enough > num_vms:
            continue
        for _ in range(15):
            for _ in range(min(rng.randint(0, more), len(world.vms) - enough)):
                world.kill(rng.choice([*world.vms]))
                more -= 1
                for _ in range(rng.choice([0, 0, 1, 2, 4, 8])):  # the next one may fall into what follows
                    world.step()
            world.join(rng.randint(0, len(world.requested)) if rng.random() < 0.5 else 0)
            world.settle()
            world.wait(rng.choice([1.0, 5.0, 200.0]))
            assert set(world.rungs[1:]) <= {"peers"}, f"MAKARA_SEED={seed}: the store was needed"
            assert world.state.running, f"MAKARA_SEED={seed}"
            current = world.state.current
            assert current is not None
            if world.copies > tolerated:
                more = tolerated
            else:
                assert current.best_until is not None, f"MAKARA_SEED={seed}: fewer copies than can be had"


def seeds(count: int) -> list[int]:
    given = os.environ.get("MAKARA_SEED")
    first = random.SystemRandom().randrange(10**9)
    found = [int(given)] if given is not None else [first + n for n in range(count)]
    print(f"MAKARA_SEED={found[0]} and those after it")
    return found


def deaths(world: BranchingWorld, most: int) -> Iterator[tuple[BranchingWorld, int]]:
    """(the world at rest, how many more might have died) after each sequence of up to `most` deaths.

    The first is at once, the others before anything happens, or after anything that has.
    """
    for vm in kinds(world):
        after = world.branch()
        after.kill(vm)
        while True:
            if most > 1 and after.vms:
                yield from deaths(after, most - 1)
            if not after.step():
                break
        yield after, most - 1


def kinds(world: BranchingWorld) -> list[str]:
    """One VM of each kind: they differ in what they hold, or are to host next."""
    first = dict[Hashable, str]()
    for vm, held in roles(world).items():
        first.setdefault(held, vm)
    return list(first.values())


def roles(world: BranchingWorld) -> dict[str, Hashable]:
    newest = world.state.planned or world.state.current
    assert newest is not None or world.state.last_generation
    ranges = newest.plan["ranges"] if newest is not None else []
    hosted = (
        {w: tuple(span) for (w, _), span in zip(newest.incarnations, ranges, strict=True)} if newest else {}
    )
    return {vm.name: tuple((t.span, hosted.get(t.worker)) for t in vm.trainers) for vm in world.vms.values()}


def situation(world: BranchingWorld) -> Hashable:
    """Equal where only names of VMs and micro-batches differ."""
    return tuple(sorted(map(repr, roles(world).values())))


def n0(world: BranchingWorld) -> int | None:
    spec = world.state.spec
    assert spec is not None
    memory = spec.resources.device_memory
    assert memory is not None
    return least_vms(world.calibration, memory, world.per_vm, recompute=True, on_host=False)


def wait_for_the_next_plan(world: BranchingWorld) -> None:
    """Until a rerouted plan, which alone may have fewer copies than can be had, has run for long enough."""
    current = world.state.current
    assert current is not None
    assert current.best_until is not None, "only a rerouted plan has fewer copies than can be had"
    world.wait(max(0.0, current.best_until - world.now) + 1.0)
