"""Whole jobs over availability traces: the real core and planner, a simulated rest."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from itertools import pairwise

import pytest
from makara.manager.replay import Outcome, Prices, ReplayError, Scenario, replay
from makara.manager.replay.planner import CachedPlanner
from makara.manager.replay.step_in_flight import StepsInFlight
from makara.manager.replay.training import Training
from makara.simulator import NodeChange, TraceEvent, read_trace
from replays import COSTS, check_instant, random_trace, scenario


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instant of every replay is looked at."""
    explain = Training.explain

    def explained(training: Training) -> None:
        explain(training)
        check_instant(training)

    monkeypatch.setattr(Training, "explain", explained)


def one(given: Scenario, policy: str = "makara", **options: object) -> Outcome:
    (outcome,) = replay(given, (policy,), **options)  # pyright: ignore[reportArgumentType]
    check_outcome(given, outcome)
    return outcome


def check_outcome(given: Scenario, outcome: Outcome) -> None:
    assert sum(outcome.seconds.values()) == pytest.approx(outcome.wall_s)
    assert all(seconds >= 0 for seconds in outcome.seconds.values())
    assert 0 <= outcome.goodput <= 1
    assert outcome.most_vms <= given.spec.resources.max_nodes
    assert outcome.lost_steps == sum(morph.lost_steps for morph in outcome.morphs)
    starts = [sample.at_ns / 1e9 for sample in outcome.series]
    lengths = [stop - start for start, stop in pairwise([*starts, outcome.wall_s])]
    there = sum(s.num_nodes * seconds for s, seconds in zip(outcome.series, lengths, strict=True))
    assert outcome.vm_hours <= there / 3600 + 1e-9
    for morph in outcome.morphs:
        assert all(seconds >= 0 for seconds in morph.phases_s.values())
        if morph.rung == "peers":
            assert morph.lost_steps == 0


def adds(count: int, at_ms: int = 0, first: int = 1) -> str:
    return "".join(f"{at_ms},add,n{n}\n" for n in range(first, first + count))


# ---- one thing at a time -----------------------------------------------------------------------------------


def test_with_nobody_leaving_only_starting_and_snapshots_are_lost() -> None:
    given = scenario(adds(2), hours=1.0, interval=5)
    outcome = one(given)
    assert [morph.kind for morph in outcome.morphs] == ["start"]
    assert outcome.morphs[0].after == "2x1"
    assert outcome.steady is not None
    (step_s,) = {16 / s.samples_per_s for s in outcome.series if s.samples_per_s}
    # boot, start, profile, trace, 3 s of gathering, then plan, prepare, open and form
    begun_s = 20 + 5 + 10 + 1 + 3 + 0.5 + 0.25 + 0.125 + 4
    assert outcome.seconds["start"] == pytest.approx(begun_s - 4.875)
    stall_s = 150 / 100  # three sections of 50 bytes that a checkpoint holds
    cycle_s = 5 * step_s + stall_s
    steps, rest_s = divmod(3600 - begun_s, cycle_s)
    steps = 5 * steps + max(0, rest_s - stall_s * (steps > 0)) // step_s
    assert abs(outcome.steps - steps) <= 1
    assert outcome.seconds["useful"] == pytest.approx(outcome.steps * step_s)
    assert outcome.vm_hours == pytest.approx(2.0)


def test_a_death_whose_sections_live_elsewhere_costs_the_step_under_way() -> None:
    given = scenario(adds(4) + "1000000,remove,n3\n", hours=0.5)
    outcome = one(given)
    start, after = outcome.morphs
    assert (start.after, after.rung, after.kind) == ("2x2", "peers", "death")
    assert (outcome.lost_steps, outcome.cut_off_steps) == (0, 1)
    assert outcome.seconds["detect"] == pytest.approx(COSTS.detect_s)
    assert outcome.seconds["decide"] == pytest.approx(0.5 + 0.5)
    assert after.idle_s == pytest.approx(sum(after.phases_s.values()) + COSTS.detect_s)


def test_a_step_that_is_cut_off_is_finished_from_what_the_others_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = scenario(adds(4) + "1000400,remove,n3\n", hours=1010 / 3600)
    outcome = one(given)
    monkeypatch.setattr(StepsInFlight, "go_on", lambda *_: None)
    again = one(given)
    assert outcome.seconds["cut_off"] < again.seconds["cut_off"]
    spent = sum(outcome.seconds[item] for item in ("useful", "cut_off", "unfinished"))
    spent_again = sum(again.seconds[item] for item in ("useful", "cut_off", "unfinished"))
    assert spent == pytest.approx(spent_again, abs=0.1)  # sending what is held took 0.02 s


def test_a_death_that_takes_the_last_of_a_section_costs_the_steps_since_the_checkpoint() -> None:
    calm = one(scenario(adds(2), hours=1000 / 3600, interval=50))
    given = scenario(adds(2) + "1000000,remove,n2\n" + adds(1, 1_000_000, 7), hours=0.5, interval=50)
    outcome = one(given)
    after = outcome.morphs[1]
    assert (after.rung, after.before, after.after) == ("store", "2x1", "2x1")
    # A checkpoint takes 150 bytes at 10 a second and a second more to exist.
    assert 0 < calm.steps % 50 <= after.lost_steps <= calm.steps % 50 + 50
    assert after.lost_steps == calm.steps % 50
    assert outcome.seconds["lost"] > 0


def test_newcomers_are_taken_in_without_losing_a_step() -> None:
    given = scenario(adds(2) + adds(2, 1_000_000, 3), hours=0.5)
    outcome = one(given)
    growth = outcome.morphs[1]
    assert (growth.kind, growth.rung, growth.before, growth.after) == ("growth", "peers", "2x1", "2x2")
    assert (outcome.lost_steps, outcome.cut_off_steps) == (0, 0)
    assert growth.idle_s is not None
    # While it is planned and prepared, the old generation steps; 150 bytes come at 100 a second.
    assert growth.idle_s == pytest.approx(COSTS.form_s + 150 / 100)


def test_with_notice_the_plan_changes_before_the_death_and_nothing_is_lost() -> None:
    given = scenario(adds(6) + "1000000,remove,n5\n", hours=0.5, notice_s=120.0)
    outcome = one(given)
    assert [morph.kind for morph in outcome.morphs] == ["start", "notice"]
    assert (outcome.lost_steps, outcome.cut_off_steps) == (0, 0)
    without = one(replace(given, notice_s=0.0))
    assert without.cut_off_steps == 1
    assert outcome.vm_hours < without.vm_hours  # it was let go when it was not needed any more


def test_a_notice_that_leaves_too_few_has_a_checkpoint_made() -> None:
    given = scenario(adds(2) + "1000000,remove,n2\n" + adds(1, 1_300_000, 7), hours=0.5, notice_s=120.0)
    outcome = one(given)
    assert outcome.lost_steps == 0
    assert outcome.morphs[-1].rung == "store"
    assert outcome.seconds["wait"] > 300


def test_too_few_vms_wait_and_go_on_when_there_are_enough() -> None:
    given = scenario(
        adds(3) + "".join(f"600000,remove,n{n}\n" for n in (1, 2, 3)) + adds(3, 1_500_000, 4), hours=0.6
    )
    outcome = one(given)
    assert [morph.rung for morph in outcome.morphs] == ["start", "store"]
    assert outcome.seconds["wait"] > 800


def test_many_deaths_at_once_are_one_morph() -> None:
    given = scenario(adds(6) + "".join(f"900000,remove,n{n}\n" for n in (1, 3, 4)), hours=0.5)
    outcome = one(given)
    assert len(outcome.morphs) == 2


def test_a_job_that_reaches_its_last_step_ends_and_releases_its_vms() -> None:
    outcome = one(scenario(adds(2), hours=5.0, steps=50))
    assert outcome.finished
    assert outcome.steps == 50
    assert outcome.wall_s < 5 * 3600
    assert outcome.vm_hours == pytest.approx(2 * outcome.wall_s / 3600)


def test_never_more_vms_than_asked_for_and_the_rest_stays_in_the_market() -> None:
    given = scenario(adds(9) + "600000,remove,n1\n", hours=0.5, max_nodes=4)
    outcome = one(given)
    assert outcome.most_vms == 4
    assert outcome.series[-1].num_vms == 4  # another node took the place


def test_vms_of_several_workers_die_with_all_of_them() -> None:
    given = scenario(adds(3) + "900000,remove,n1\n", hours=0.5, workers_per_node=2)
    outcome = one(given)
    assert [morph.after for morph in outcome.morphs] == ["3x2", "2x2"]
    assert outcome.morphs[1].rung == "peers"


# ---- policies ----------------------------------------------------------------------------------------------


def test_the_naive_policy_always_restarts_from_the_store_at_one_depth() -> None:
    given = scenario(adds(6) + "900000,remove,n5\n" + adds(1, 1_200_000, 9), hours=0.6)
    ours, naive = replay(given, ("makara", "fixed"), fixed_depth=3)
    for outcome in (ours, naive):
        check_outcome(given, outcome)
    assert {morph.after.partition("x")[0] for morph in naive.morphs} == {"3"}
    assert [morph.rung for morph in naive.morphs] == ["start", "store", "store"]
    assert naive.lost_steps > ours.lost_steps == 0
    assert naive.goodput < ours.goodput


def test_the_naive_policy_waits_below_its_depth() -> None:
    given = scenario(adds(4) + "900000,remove,n1\n900000,remove,n2\n", hours=0.5)
    ours, naive = replay(given, ("makara", "fixed"), fixed_depth=4)
    assert naive.seconds["wait"] > 800 > ours.seconds["wait"]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ReplayError,
        match="policy: 'best' is unknown; known are makara, varuna, oobleck, slipstream, bamboo, fixed",
    ):
        replay(scenario(adds(2), hours=1.0), ("best",))


# ---- histories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(9))
def test_random_histories_keep_their_account(seed: int) -> None:
    print(f"seed {seed}")
    notice_s = (0.0, 30.0)[seed % 2]
    interval = (5, 12, "3m")[seed % 3]
    workers = 1 + (seed % 4 == 1)
    given = scenario(random_trace(seed), interval=interval, notice_s=notice_s, workers_per_node=workers)
    planner = CachedPlanner()
    first = replay(given, ("makara", "fixed"), planner=planner)
    for outcome in first:
        check_outcome(given, outcome)
    assert planner.num_asked <= planner.num_answered
    if seed < 3:
        again = replay(given, ("makara", "fixed"))
        assert [outcome.to_json() for outcome in again] == [outcome.to_json() for outcome in first]


@pytest.mark.parametrize("seed", range(4))
def test_what_the_ladder_promises_is_kept(seed: int) -> None:
    """From the store at most an interval is lost, and what was done while a checkpoint was on its way."""
    print(f"seed {seed}")
    given = scenario(random_trace(100 + seed), interval=5)
    outcome = one(given)
    shortest_s = min(16 / s.samples_per_s for s in outcome.series if s.samples_per_s)
    publish_s = 300 / COSTS.store_bytes_per_s + COSTS.publish_s
    for morph in outcome.morphs:
        # One that a death or a switch overtakes is missed; the next generation makes up for it at once.
        assert morph.lost_steps <= 2 * (5 + publish_s / shortest_s) + 1, morph


@pytest.mark.slow
@pytest.mark.parametrize(("hours", "reuse"), [(2.0, 1), pytest.param(12.0, 2, marks=pytest.mark.soak)])
def test_a_real_markets_trace(hours: float, reuse: int) -> None:
    """Bamboo's, whole or in part: eleven hours and 344 changes of up to 32 nodes."""
    text = resources.files("makara.examples.replay").joinpath("bamboo-p3.csv").read_text()
    trace = [event for event in read_trace(text) if event.time_ms <= hours * 3_600_000]
    given = scenario(trace, interval="10m", max_nodes=32, min_nodes=2)
    planner = CachedPlanner()
    prices = Prices(spot=1.0, on_demand=3.0)
    ours, naive = replay(given, ("makara", "fixed"), prices=prices, planner=planner)
    for outcome in (ours, naive):
        check_outcome(given, outcome)
        assert outcome.wall_s == pytest.approx(trace[-1].time_ms / 1000)
        assert outcome.most_vms == 32
    assert ours.goodput > naive.goodput
    assert len(ours.morphs) > 5 * hours
    assert planner.num_answered > reuse * planner.num_asked  # questions also differ by what deaths cost
    assert ours.spot_cost == pytest.approx(ours.vm_hours)
    assert ours.on_demand_cost is not None


def test_vms_that_only_wait_cost_no_decisions() -> None:
    quiet = one(scenario(adds(6), hours=1.0))
    month = one(scenario(adds(6), hours=24.0 * 30))
    assert month.num_decisions == quiet.num_decisions
    assert month.steps > 700 * quiet.steps


def test_a_market_that_takes_vms_before_a_step_is_made_has_no_replay_wait_for_a_person() -> None:
    events, at_ms = list[TraceEvent](), 0
    for pair in range(12):
        nodes = (f"n{pair}.0", f"n{pair}.1")
        events += [TraceEvent(at_ms, NodeChange.ADD, node) for node in nodes]
        events += [TraceEvent(at_ms + 40_000, NodeChange.REMOVE, node) for node in nodes]
        at_ms += 100_000
    events += [TraceEvent(at_ms, NodeChange.ADD, node) for node in ("a", "b")]
    events.append(TraceEvent(at_ms + 3_600_000, NodeChange.ADD, "the end"))
    assert one(scenario(events, max_nodes=2)).steps > 0
