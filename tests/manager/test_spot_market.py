"""What the benchmark `goodput` plays to real processes, and how it reads what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from calibrations import uniform
from makara.manager.cli.client import RequestRefused
from makara.manager.core.commands import ComputePlan, WorkerSlot
from makara.manager.core.state import JobState
from makara.manager.replay import POLICIES, replay
from makara.manager.replay.trace_world import JOB
from makara.pipeline import Plan
from makara.simulator import MorphCosts, NodeChange, TraceEvent
from replays import scenario

from benchmarks.goodput import judged
from benchmarks.spot.job import BATCH, NUM_MICRO_BATCHES
from benchmarks.spot.market import NODES, NOTICE_S, WINDOW_S, Spot, spot
from benchmarks.spot.measured import Start, began, costs, measured
from benchmarks.spot.player import Played, Player
from benchmarks.spot.predicted import predicted, without_start

ADD, REMOVE = NodeChange.ADD, NodeChange.REMOVE


def market_of(*events: tuple[float, NodeChange, str], noticed: tuple[str, ...] = ()) -> Spot:
    return Spot([TraceEvent(round(1000 * at), what, node) for at, what, node in events], frozenset(noticed))


# ---- the market --------------------------------------------------------------------------------------------


def test_the_market_has_joins_deaths_alone_and_together_and_notices() -> None:
    market = spot()
    assert market == spot()
    removed = [event for event in market.later if event.change is REMOVE]
    assert len(market.first) == NODES
    assert sum(event.change is ADD for event in market.later) >= 3
    assert 2 <= len(market.noticed) < len(removed) - 1
    together = {event.time_ms: [it for it in removed if it.time_ms == event.time_ms] for event in removed}
    assert {len(events) for events in together.values()} == {1, 2}


def test_nodes_are_up_before_they_go_and_events_are_apart() -> None:
    market = spot()
    came = {event.node: event.time_ms for event in market.events if event.change is ADD}
    told = {e.time_ms - round(1000 * NOTICE_S) for e in market.later if e.node in market.noticed}
    times = sorted({event.time_ms for event in market.events} | told | {round(1000 * WINDOW_S)})
    assert min(after - before for before, after in pairwise(times)) >= 7000
    for event in market.later:
        assert event.change is ADD or not came[event.node] or event.time_ms - came[event.node] > 30_000


def test_a_delay_leaves_the_first_nodes_where_they_are() -> None:
    market = market_of((0, ADD, "a"), (5, REMOVE, "a"))
    assert [event.time_ms for event in market.delayed(700)] == [0, 5700]


# ---- played to VMs -----------------------------------------------------------------------------------------


@dataclass
class Stage:
    """A manager whose VMs come two seconds after they are offered; time goes on when the player pauses."""

    now: float = 1000.0
    up: dict[str, float] = field(default_factory=dict[str, float])
    acts: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    gone: tuple[str, ...] = ()

    def job(self, job: str) -> dict[str, Any]:
        vms = [{"vm": vm, "status": "joined"} for vm, at in self.up.items() if at <= self.now]
        return {"status": "running", "reason": None, "vms": vms, "job": job}

    def set_capacity(self, vms: int) -> None:
        self.acts.append((self.now - 1000.0, f"{vms} VMs"))
        if vms > len(self.up):
            self.up[f"vm{len(self.up) + 10}"] = self.now + 2.0

    def fault(self, vm: str, kind: str, deadline_s: float = 0.0) -> None:
        if vm in self.gone:
            raise RequestRefused(404, "gone", [])
        self.acts.append((self.now - 1000.0, f"{kind} {vm}" + (f" in {deadline_s:g}" if deadline_s else "")))
        del self.up[vm]

    def pause(self, seconds: float) -> None:
        self.now += seconds


def play(stage: Stage, market: Spot, window_s: float = 60.0) -> Played:
    stage.up = {f"vm{number}": 0.0 for number in range(len(market.first))}
    player = Player(stage, "job", market, clock=lambda: stage.now, pause=stage.pause)
    player.play(1000.0, window_s)
    assert stage.now == pytest.approx(1000.0 + window_s)
    return player.played


def test_what_the_market_takes_and_gives_happens_at_its_time() -> None:
    market = market_of(
        (0, ADD, "a"), (0, ADD, "b"), (0, ADD, "c"), (20, REMOVE, "b"), (30, ADD, "d"), (40, REMOVE, "d"),
        (45, REMOVE, "a"), (70, REMOVE, "c"), noticed=("a",),
    )  # fmt: skip
    stage = Stage()
    played = play(stage, market)
    assert [
        (round(at, 6), what) for at, what in stage.acts
    ] == [
        (20.0, "2 VMs"), (20.0, "kill vm1"), (30.0, "3 VMs"), (35.0, "2 VMs"), (35.0, "notice vm0 in 10"),
        (40.0, "1 VMs"), (40.0, "kill vm12"),
    ]  # fmt: skip
    assert played.killed_at == {"vm1": 1020.0, "vm12": 1040.0}
    assert played.noticed_at == {"vm0": 1035.0}
    assert played.offered_at == {"vm12": 1030.0}


def test_a_vm_that_is_gone_already_was_not_killed() -> None:
    stage = Stage(gone=("vm0",))
    assert play(stage, market_of((0, ADD, "a"), (5, REMOVE, "a"))).killed_at == {}


# ---- what came of it ---------------------------------------------------------------------------------------


def morph(generation: int, step: int | None, cause: str = "start", **change: Any) -> dict[str, Any]:
    return {
        "generation": generation,
        "shape": f"{generation}x1",
        "cause": cause,
        "at": 100.0,
        "step": step,
        "lost_steps": 0,
        "in_flight": None,
        "predicted_s": 2.0,
        "phases_s": {"decide": 0.25, "prepare": 0.1, "open": 0.02, "form": 0.5, "first_step": 2.0},
        "inside_form_s": {"rendezvous": 0.1, "load": 0.2},
    } | change


def rows(*steps: tuple[int, int, float]) -> list[dict[str, Any]]:
    return [{"step": step, "generation": number, "seconds": seconds} for step, number, seconds in steps]


def test_the_window_begins_with_the_first_step_on_all_nodes() -> None:
    seats = [{"vm": "a"}, {"vm": "b"}]
    view = {"morphs": [morph(1, 0)], "placement": seats}
    assert began(view, 2) == (pytest.approx(102.62), 1, 1)
    assert began(view, 3) is None
    assert began({"morphs": [], "placement": []}, 1) is None
    unstepped = morph(2, 4, phases_s={"decide": 0.1, "prepare": 0.1, "open": 0.1, "form": 0.1})
    assert began({"morphs": [morph(1, 0), unstepped], "placement": seats}, 2) is None


def test_steps_count_for_their_seconds_and_the_first_of_a_generation_as_one_of_the_others() -> None:
    view = {
        "step": 9,
        "morphs": [
            morph(1, 0),
            morph(2, 4, in_flight={"kept": 3.0}),
            morph(3, 6, lost_steps=1),
            morph(4, None),
            morph(5, 8),
        ],
    }
    steps = rows((1, 1, 9.0), (2, 1, 2.0), (3, 1, 2.2), (4, 1, 2.4), (5, 2, 7.0))
    steps += rows((6, 2, 3.0), (7, 3, 4.5), (8, 3, 4.0), (9, 5, 99.0), (10, 5, 3.0))
    found = measured(view, steps, Start(0.0, 1, 1), window_s=40.0)
    pace = 2.4 / 2.0  # the median of 1, 1.1, 1.2, 1.5 and 2.0
    useful = (2.0 + 2.2 + 2.4) + (3.0 + 3.0) + (4.0 + 4.0) + pace * 2.0
    assert (found.steps, found.lost_steps) == (8, 1)
    assert found.goodput == pytest.approx(useful / 40.0)
    assert found.shapes == ("1x1", "2x1", "3x1", "5x1")
    assert found.first_extra_s == pytest.approx(0.5)


def test_costs_are_those_of_the_run_and_how_soon_its_manager_knew_of_deaths() -> None:
    lost = morph(2, 4, "lost job-vm1.0, job-vm2.0", at=1025.0)
    other = morph(3, 6, "lost job-vm7.0", at=1060.0)  # nobody killed it
    vms = [{"vm": "job-vm8", "joined_at": 1041.5}, {"vm": "job-vm0", "joined_at": 2.0}]
    played = Played({"job-vm1": 1024.5, "job-vm2": 1024.25}, {"job-vm8": 1040.0})
    found = costs({"morphs": [morph(1, 0), lost, other], "vms": vms}, played)
    assert found.detect_s == pytest.approx((0.25 + 0.5) / 2)
    assert (found.plan_s, found.form_s) == pytest.approx((0.25, 0.3))
    assert found.boot_s == 1.5
    assert costs({"morphs": [], "vms": []}, Played()) == MorphCosts()


def test_where_all_start_again_their_start_is_not_counted_as_forming_too() -> None:
    assert without_start(MorphCosts(form_s=9.0, start_s=6.0, trace_s=1.0)).form_s == 2.0
    assert without_start(MorphCosts(form_s=5.0, start_s=6.0)).form_s == 0.0


def test_predictions_are_judged_by_the_farthest_and_by_their_order() -> None:
    values = [(10.0, 11.0), (10.5, 9.0), (20.0, 10.0), (5.0, 5.0)]
    rows = [{"samples/s": real, "predicted samples/s": told} for real, told in values]
    assert judged(rows, "samples/s") == {
        "of": "samples/s",
        "farthest, predicted / measured": 0.5,
        "pairs more than 10 % apart": 5,
        "of them predicted in the same order": 4,
    }


# ---- what a replay says of it ------------------------------------------------------------------------------


def test_in_a_window_without_events_every_second_is_useful() -> None:
    market = market_of(*((0, ADD, f"n{number}") for number in range(NODES)))
    calibration = uniform(13, microbatch_size=BATCH // NUM_MICRO_BATCHES)
    told = predicted(POLICIES["makara"], market, calibration, MorphCosts(), 7200.0)
    assert sum(told.seconds.values()) == pytest.approx(7200.0)
    assert told.seconds["useful"] + told.seconds["unfinished"] == pytest.approx(7200.0, abs=0.1)
    assert told.steps > 10
    assert len(told.shapes) == 1


def test_a_death_costs_a_window_what_is_known_of_deaths() -> None:
    nodes = [(0.0, ADD, f"n{number}") for number in range(NODES)]
    calibration = uniform(13, microbatch_size=BATCH // NUM_MICRO_BATCHES)
    market = market_of(*nodes, (3000, REMOVE, "n1"))
    told = predicted(POLICIES["varuna"], market, calibration, MorphCosts(detect_s=33.0), 7200.0)
    assert told.seconds["detect"] == pytest.approx(33.0)
    assert len(told.shapes) == 2


def test_of_notices_only_the_nodes_that_have_one_are_told() -> None:
    trace = "".join(f"0,add,n{n}\n" for n in range(6)) + "1000000,remove,n2\n1500000,remove,n3\n"
    given = scenario(trace, hours=0.5, notice_s=60.0, noticed=("n3",))
    (outcome,) = replay(given)
    assert [one.kind for one in outcome.morphs] == ["start", "death", "notice"]


@pytest.mark.parametrize(("policy", "shape"), [("oobleck", "3+2"), ("varuna", "2x2"), ("makara", "2x2")])
def test_a_real_manager_may_ask_a_policy_for_its_plans(policy: str, shape: str) -> None:
    given = scenario("0,add,n1\n1,remove,n1\n")
    state = JobState(job=JOB, spec=given.spec, recipe=given.recipe, calibration=given.calibration.to_json())
    workers = tuple(WorkerSlot(worker=f"vm{n}.0", vm=f"vm{n}", memory_bytes=200) for n in range(5))
    command = ComputePlan(key="plan", generation=7, workers=workers)
    answer = POLICIES[policy].choose_plan(state, command, lambda: 3.0)
    assert answer.plan is not None
    assert Plan.from_json(answer.plan).shape == shape
    assert (answer.now, answer.generation, answer.asked) == (3.0, 7, command.asked)
