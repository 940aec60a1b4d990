"""Jobs, traces and checks for tests of replays."""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

from calibrations import uniform
from makara.manager.replay import Scenario
from makara.manager.replay.group import GroupPhase
from makara.manager.replay.training import Training
from makara.manager.spec.job_spec import parse_spec
from makara.simulator import Link, MorphCosts, NodeChange, TraceEvent, read_availability

COSTS = MorphCosts(
    boot_s=20.0,
    start_s=5.0,
    trace_s=1.0,
    profile_s=10.0,
    detect_s=2.0,
    plan_s=0.5,
    prepare_s=0.25,
    open_s=0.125,
    form_s=4.0,
    publish_s=1.0,
    store_bytes_per_s=10.0,
    snapshot_bytes_per_s=100.0,
)


def scenario(trace: str | list[TraceEvent], *, interval: int | str = 5, **change: Any) -> Scenario:
    """Eight micro-batches through six sections of 51 bytes; the workers' 200 call for P=2 at least."""
    given: dict[str, Any] = {"max_nodes": 6, "min_nodes": 1, "steps": 10**7, "workers_per_node": 1} | {
        name: change.pop(name)
        for name in ("max_nodes", "min_nodes", "steps", "workers_per_node")
        if name in change
    }
    steps = given.pop("steps")
    spec = parse_spec(
        {
            "name": "replayed",
            "entrypoint": "train:build",
            "resources": {"provider": "local", "device_memory": 200, **given},
            "training": {"global_batch_size": 16, "steps": steps},
            "checkpoint": {"uri": "file:///c", "interval": interval, "keep_latest_k": 2},
        }
    )
    events = read_availability(trace) if isinstance(trace, str) else trace
    link = Link(latency_s=0.0, bytes_per_s=100.0)
    calibration = uniform(
        6,
        forward_s=(0.1,) * 6,
        backward_s=(0.2,) * 6,
        optimizer_s=(0.05,) * 6,
        gradient_bytes=(1,) * 6,
        state_bytes=(51,) * 6,
        cut_bytes=(0,) * 5,
        grad_cut_bytes=(0,) * 5,
        inter_vm=link,
    )
    values: dict[str, Any] = {"spec": spec, "calibration": calibration, "trace": events, "costs": COSTS}
    return Scenario(**(values | change))


def random_trace(seed: int) -> list[TraceEvent]:
    """An hour in which nodes come and go, some many at a time."""
    draw = random.Random(seed)
    live: list[str] = []
    events: list[TraceEvent] = []
    named, at_ms = 0, 0
    while at_ms < 3_600_000:
        for _ in range(draw.choice((1, 1, 2, 4))):
            if live and draw.random() < len(live) / 12:
                node = live.pop(draw.randrange(len(live)))
                events.append(TraceEvent(at_ms, NodeChange.REMOVE, node))
            else:
                named += 1
                live.append(f"n{named}")
                events.append(TraceEvent(at_ms, NodeChange.ADD, live[-1]))
        at_ms += draw.choice((0, 500, 3_000, 20_000, 60_000, 400_000))
    return events


def check_instant(training: Training) -> None:
    """What must hold after every instant: the core and its trainers are of one mind."""
    world, group = training.world, training.group
    state = world.state
    assert len(state.live_vms) <= world.spec.resources.max_nodes
    assert set(world.fleet.vms) <= {vm.vm for vm in state.live_vms}, "every VM that costs is known"
    assert len(world.fleet.vms) + len(world.fleet.free) <= world.fleet.num_nodes
    if group is not None and group.doing is GroupPhase.STEPPING:
        assert all(world.fleet.trainers.get(t.worker) is t for t in group.workers), "the dead do not step"
        assert state.ended is None
    if state.running and state.current is not None and not training.undetected:
        assert group is not None, "the core thinks that a generation runs"
        assert group.number == state.current.number
        assert group.doing in (GroupPhase.STEPPING, GroupPhase.SAVING, GroupPhase.RESTING), (
            world.now_ns,
            group,
        )
    if state.running and state.current is not None:  # as far as it was told before the death
        assert state.current.lost_steps <= training.begun[state.current.number].lost_steps
    for section in range(world.scenario.calibration.num_sections):
        held = [own.contributions.get(section, 0) for own in training.in_flight.held.values()]
        assert sum(held) == functools.reduce(operator.or_, held, 0), "no contribution is held twice"
    listed = [(ref.generation, ref.step) for ref in world.store.listed]
    assert listed == sorted(listed, reverse=True)
    assert set(state.published) <= set(world.store.listed) or state.ended is not None
