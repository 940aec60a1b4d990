"""What replaying a whole job costs, and what came of it: a real market's trace, a month, thousands of VMs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from makara.manager.replay import Outcome, Scenario, replay
from makara.manager.replay.planner import CachedPlanner
from makara.manager.spec.job_spec import parse_spec, parse_yaml
from makara.simulator import Calibration, NodeChange, TraceEvent, read_trace, warm_up

from .made_up import model
from .report import Row

TITLE = "a whole job over an availability trace, in virtual time"
_EXAMPLE = resources.files("makara.examples.replay")


def rows() -> list[Row]:
    """One row for each replay. `planner s` of the `replay s` went into the planner itself."""
    warm_up(wait=True)
    calibration = Calibration.from_json(json.loads(_EXAMPLE.joinpath("calibration.json").read_text()))
    return [
        *_rows("bamboo-p3.csv, 2.5 B parameters", example(calibration), ("makara", "fixed")),
        *_rows("30 days, up to 64 VMs, batch 512", churning(calibration, 64, 30 * 24, 600, 512), ("makara",)),
        *_rows(
            "1 day, up to 1000 VMs, 6 sections", churning(six_sections(), 1000, 24, 50, 1024), ("makara",)
        ),
    ]


def example(calibration: Calibration) -> Scenario:
    """Row 6 of what is promised: `examples/replay`, whole."""
    spec = parse_yaml(_EXAMPLE.joinpath("job.yaml").read_text().replace("./", "file:///"))
    trace = read_trace(_EXAMPLE.joinpath("bamboo-p3.csv").read_text())
    return Scenario(spec=spec, calibration=calibration, trace=trace)


def six_sections() -> Calibration:
    """A made-up model that the planner is quick with, so that the replay itself is seen with many VMs."""
    return replace(
        model((0.1,) * 6),
        optimizer_s=(0.01,) * 6,
        parameter_bytes=(10**8,) * 6,
        gradient_bytes=(10**8,) * 6,
        state_bytes=(4 * 10**9,) * 6,
        activation_bytes=(10**9,) * 6,
        cut_bytes=(10**6,) * 5,
        grad_cut_bytes=(10**6,) * 5,
    )


def churning(calibration: Calibration, most: int, hours: int, changes: int, batch: int) -> Scenario:
    """A market that has between 3/4 of `most` nodes and all; drawn from a fixed seed."""
    spec = parse_spec(
        {
            "name": "churning",
            "entrypoint": "train:build",
            "resources": {"provider": "local", "max_nodes": most, "device_memory": 16 * 10**9},
            "training": {"global_batch_size": batch, "steps": 10**9},
            "checkpoint": {"uri": "file:///checkpoints", "interval": "10m"},
        }
    )
    return Scenario(spec=spec, calibration=calibration, trace=_churn(most, hours, changes), hours=hours)


def _churn(most: int, hours: int, changes: int) -> Sequence[TraceEvent]:
    draw = random.Random(1)
    live = [f"n{n}" for n in range(most)]
    events = [TraceEvent(0, NodeChange.ADD, node) for node in live]
    for number, at_ms in enumerate(sorted(draw.randrange(1, hours * 3_600_000) for _ in range(changes))):
        if len(live) == most or (len(live) > most * 3 // 4 and draw.random() < 0.5):
            events.append(TraceEvent(at_ms, NodeChange.REMOVE, live.pop(draw.randrange(len(live)))))
        else:
            live.append(f"m{number}")
            events.append(TraceEvent(at_ms, NodeChange.ADD, live[-1]))
    return events


def _rows(what: str, scenario: Scenario, policies: Sequence[str]) -> list[Row]:
    found: list[Row] = []
    for policy in policies:
        planner = CachedPlanner()
        began = time.perf_counter()
        (outcome,) = replay(scenario, (policy,), planner=planner)
        found.append(_row(what, outcome, time.perf_counter() - began, planner))
    return found


def _row(what: str, outcome: Outcome, seconds: float, planner: CachedPlanner) -> Row:
    return {
        "what": what,
        "policy": outcome.policy,
        "replay s": seconds,
        "planner s": planner.asked_s,
        "plans": planner.num_asked,
        "decisions": outcome.num_decisions,
        "morphs": len(outcome.morphs),
        "goodput %": 100 * outcome.goodput,
        "samples/s": outcome.samples_per_s,
        "steps again": outcome.lost_steps,
    }
