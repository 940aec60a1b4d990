"""The parts of a replay: stretches in closed form, count series, costs, placement, pictures, the command."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import pytest
from calibrations import uniform
from core_script import Script
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.examples.replay.make_calibration import calibration as example
from makara.manager.cli.main import main
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import Batch, VmTerminated
from makara.manager.core.facts import VmEnded
from makara.manager.replay import Prices, ReplayError, replay
from makara.manager.replay.picture import draw
from makara.manager.replay.steady_run import SteadyRun
from makara.morphing import Slot, balance, place, stage_table
from makara.pipeline import Range, grid
from makara.simulator import (
    Calibration,
    InvalidCosts,
    InvalidTrace,
    MorphCosts,
    NodeChange,
    TraceEvent,
    read_availability,
    read_counts,
    read_trace,
    simulate,
)
from replays import random_trace, scenario

# ---- stretches ---------------------------------------------------------------------------------------------

STRETCHES = st.integers(1, 7).flatmap(
    lambda step_ns: st.builds(
        SteadyRun,
        began_ns=st.integers(0, 50),
        first_step=st.just(0),
        step_ns=st.just(step_ns),
        first=st.integers(1, 5),
        every=st.integers(1, 5),
        stall_ns=st.integers(0, 6),
        publish_ns=st.integers(0, 40),
        at_once=st.booleans(),
        ahead_ns=st.integers(-5, step_ns - 1),
    )
)


class Played:
    """The same stretch, step by step."""

    def __init__(self, stretch: SteadyRun, until_ns: int) -> None:
        self.ends = [stretch.began_ns]
        self.taken: list[tuple[int, int]] = []  # (when, after how many steps)
        self.stalls: list[range] = []
        now, steps = stretch.began_ns, 0
        while now <= until_ns:
            due = stretch.at_once if steps == 0 else steps >= stretch.first
            if due and (steps == 0 or (steps - stretch.first) % stretch.every == 0):
                self.taken.append((now, steps))
                self.stalls.append(range(now, now + stretch.stall_ns))
                now += stretch.stall_ns
            now += stretch.step_ns - (0 if steps else stretch.ahead_ns)
            steps += 1
            self.ends.append(now)


@settings(max_examples=150, deadline=None)
@given(stretch=STRETCHES, after=st.integers(0, 200))
def test_a_stretch_in_closed_form_is_what_its_steps_come_to(stretch: SteadyRun, after: int) -> None:
    now = stretch.began_ns + after
    played = Played(stretch, now + 100)
    done = sum(end <= now for end in played.ends) - 1
    assert stretch.steps_at(now) == done
    assert stretch.ends_ns(done) == played.ends[done]
    assert stretch.next_end_ns(now) == played.ends[done + 1]
    assert stretch.stalled_ns(now) == sum(len(range(s.start, min(s.stop, now))) for s in played.stalls)
    under_way = range(played.ends[done], now)
    assert stretch.under_way_ns(now) == sum(not any(at in s for s in played.stalls) for at in under_way)
    uploaded = [steps for at, steps in played.taken if at + stretch.publish_ns <= now]
    newest = stretch.newest_published(now)
    if stretch.publish_ns <= stretch.stall_ns + stretch.every * stretch.step_ns:
        assert newest == (uploaded[-1] if uploaded else None)
        assert stretch.num_published(now) == len(uploaded)
    else:  # uploads one after another: fewer exist, and none that was not taken in time
        assert newest in {None, *uploaded}
        assert stretch.num_published(now) <= len(uploaded)


# ---- traces and costs --------------------------------------------------------------------------------------


def test_a_series_of_counts_becomes_comings_and_goings() -> None:
    events = read_counts("seconds,count\n0,3\n60,1\n\n90.5,2\n", seed=4)
    assert [(e.time_ms, e.change) for e in events] == [
        (0, NodeChange.ADD),
        (0, NodeChange.ADD),
        (0, NodeChange.ADD),
        (60_000, NodeChange.REMOVE),
        (60_000, NodeChange.REMOVE),
        (90_500, NodeChange.ADD),
    ]
    assert len({e.node for e in events if e.change is NodeChange.ADD}) == 4
    assert events == read_availability("0,3\n60,1\n90.5,2\n", seed=4)
    text = "".join(f"{e.time_ms},{e.change},{e.node}\n" for e in events)
    assert read_trace(text) == events == read_availability(text)
    drawn = {read_counts("0,9\n60,3\n", seed=seed) for seed in range(5)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the trace is empty"),
        ("seconds,count\n", "line 1: the trace is empty"),
        ("0,3\n5\n", r"line 2: '5': expected 2 columns \(seconds,count\), got 1"),
        ("0,3\nx,4\n", "line 2: 'x' is not a number of seconds >= 0"),
        ("0,3\nnan,4\n", "line 2: 'nan' is not"),
        ("0,3\n9,-1\n", "line 2: '-1' is not a number of nodes from 0 to 100000"),
        ("0,3\n9,1e3\n", "line 2: '1e3' is not a number of nodes"),
        ("0,3\n9,999999999\n", "line 2: '999999999' is not a number of nodes"),
        ("9,3\n9,4\n", "line 2: 9 s does not come after 9 s"),
        ("0,add,a\n5,6\n", "line 2: '5,6': expected 3 columns"),
        (",,\n", r"line 1: ',,': expected rows ms,add\|remove,node"),
        ("9" * 5000 + ",add,a\n", "line 1: '999"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidTrace, match=message):
        read_availability(text)


def test_costs_are_read_field_by_field() -> None:
    costs = MorphCosts.from_json('{"boot_s": 90, "store_bytes_per_s": 5e8}')
    assert (costs.boot_s, costs.store_bytes_per_s) == (90, 5e8)
    assert costs.form_s == MorphCosts().form_s
    assert MorphCosts.from_json(json.dumps(costs.to_json())) == costs


def test_costs_are_measured_on_a_job_that_ran() -> None:
    def morph(cause: str, decide: float, form: float, load: float) -> dict[str, object]:
        phases = {"decide": decide, "prepare": 0.5, "open": 0.25, "form": form, "first_step": 9.0}
        return {"cause": cause, "phases_s": phases, "inside_form_s": {"load": load, "groups": 0.1}}

    morphs = [
        morph("start", 0.1, 2.0, 1.0),
        morph("lost vm1.0", 0.3, 8.0, 4.0),
        morph("vm2.0 joined", 3.0, 5.0, 3.0),
    ]
    morphs.append({"cause": "lost vm3.0", "phases_s": {"decide": 7.0}, "inside_form_s": {}})  # never formed
    costs = MorphCosts.from_json(json.dumps({"job": "j", "morphs": morphs}))
    assert (costs.plan_s, costs.prepare_s, costs.open_s, costs.form_s) == (0.2, 0.5, 0.25, 4.0)
    assert costs.boot_s == MorphCosts().boot_s
    assert MorphCosts.from_json('{"morphs": []}') == MorphCosts()


def test_until_a_trainer_is_ready_is_measured_on_vms_that_came_while_the_job_ran() -> None:
    phases = {"decide": 3.0, "prepare": 0.5, "open": 0.25, "form": 1.0}
    formed = {"phases_s": phases, "inside_form_s": {"load": 0.0}, "at": 200.0}
    morphs = [{"cause": "start", **formed}, {"cause": "j-vm1.0, j-vm2.0 joined", **formed}]
    vms = [
        {"vm": "j-vm0", "joined_at": 100.0},
        {"vm": "j-vm1", "joined_at": 190.0},
        {"vm": "j-vm2", "joined_at": 192.0},
        {"vm": "j-vm3", "joined_at": None},
    ]
    costs = MorphCosts.from_json(json.dumps({"morphs": morphs, "vms": vms}))
    assert (costs.boot_s, costs.start_s, costs.trace_s) == (MorphCosts().boot_s, 6.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"morphs": [1]}', "morphs: not as `makara status --json` prints them"),
        ("[]", "costs: expected a mapping of keys to values, got \\[\\]"),
        ('{"boot": 1}', r"boot: unknown key; did you mean boot_s\? \(accepted here: boot_s"),
        ('{"boot_s": "1"}', "boot_s: expected a valid number, got '1'"),
        ('{"boot_s": -1}', "boot_s: expected greater than or equal to 0, got -1"),
        ('{"store_bytes_per_s": 0}', "store_bytes_per_s: expected greater than 0, got 0"),
    ],
)
def test_bad_costs_name_the_field(text: str, message: str) -> None:
    with pytest.raises(InvalidCosts, match=message):
        MorphCosts.from_json(text)


# ---- what the replay leans on ------------------------------------------------------------------------------


def test_deaths_that_are_told_together_are_decided_on_once() -> None:
    script = Script()
    workers = script.run(4)
    before = script.count(ComputePlan)
    gone = [w.partition(".")[0] for w in workers[:2]]
    deaths = tuple(VmTerminated(now=script.now, vm=vm) for vm in gone)
    script.event(Batch(now=script.now, events=deaths))
    assert script.count(VmEnded) == 2
    assert script.count(ComputePlan) == before + 1
    assert {slot.worker for slot in script.last(ComputePlan).workers} == set(workers[2:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_workers_are_placed_so_that_no_two_would_keep_more_in_each_others_place(data: st.DataObject) -> None:
    num_sections = data.draw(st.integers(1, 6))

    def split() -> list[Range]:
        cuts = data.draw(st.sets(st.integers(1, num_sections - 1))) if num_sections > 1 else set[int]()
        return [Range(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), num_sections])]

    stages, before = split(), split()
    num_workers = len(stages) * data.draw(st.integers(1, 3))
    slots = [Slot(f"vm{n}.0", f"vm{n}", 1) for n in range(num_workers)]
    spans = data.draw(st.lists(st.sampled_from([None, *before]), min_size=num_workers, max_size=num_workers))
    holding = {slot.worker: span for slot, span in zip(slots, spans, strict=True) if span is not None}
    weights = data.draw(st.lists(st.integers(0, 4), min_size=num_sections, max_size=num_sections))

    def kept(slot: Slot, rank: int) -> int:
        held, wanted = holding.get(slot.worker), stages[rank % len(stages)]
        return 0 if held is None else sum(weights[s] for s in wanted.sections if s in held)

    placed = place(slots, stages, holding, weights)
    assert sorted(slot.worker for slot in placed) == sorted(slot.worker for slot in slots)
    for (rank, one), (other_rank, other) in itertools.combinations(enumerate(placed), 2):
        now = kept(one, rank) + kept(other, other_rank)
        assert now >= kept(one, other_rank) + kept(other, rank)
    by_pairs = _kept_by_pairs(slots, kept)
    assert sum(kept(slot, rank) for rank, slot in enumerate(placed)) >= by_pairs


def _kept_by_pairs(slots: Sequence[Slot], kept: Callable[[Slot, int], int]) -> int:
    """What is kept where the pair that keeps most comes first, of all pairs of a worker and a rank."""
    pairs = itertools.product(range(len(slots)), repeat=2)
    ranked = sorted(pairs, key=lambda pair: (-kept(slots[pair[0]], pair[1]), pair))
    placed: dict[int, int] = {}
    for index, rank in ranked:
        if rank not in placed and index not in placed.values():
            placed[rank] = index
    return sum(kept(slots[index], rank) for rank, index in placed.items())


# ---- the example -------------------------------------------------------------------------------------------

FOLDER = Path(str(resources.files("makara.examples.replay")))


def test_the_examples_calibration_is_what_its_arithmetic_gives_and_near_what_varuna_measured() -> None:
    calibration = example()
    assert Calibration.from_json(json.loads((FOLDER / "calibration.json").read_text())) == calibration
    assert sum(calibration.parameter_bytes) / 4 == pytest.approx(2.5e9, rel=0.05)
    # Varuna, Tables 3 and 7: seconds for a batch of 8192.
    for depth, replicas, seconds in ((6, 6, 8192 / 66.6), (9, 7, 70.1)):
        splits = balance(stage_table(calibration), depth, recompute=True, fits=lambda start, stop: True)
        stages = splits[depth].stages
        step = simulate(grid(stages, replicas, 2048, recompute=True), calibration)
        assert step.time_s == pytest.approx(seconds, rel=0.06), (depth, replicas)


# ---- the command -------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    """Arguments for a small job over a small trace."""
    small = scenario("0,3\n", hours=1.0)
    spec = small.spec.model_dump(mode="json", exclude_none=True)
    (folder / "job.yaml").write_text(json.dumps(spec))
    (folder / "calibration.json").write_text(json.dumps(small.calibration.to_json()))
    (folder / "trace.csv").write_text("0,3\n600,2\n1200,5\n3600,4\n")
    names = {"--file": "job.yaml", "--trace": "trace.csv", "--calibration": "calibration.json"}
    return ["simulate", *(part for option, name in names.items() for part in (option, str(folder / name)))]


def test_the_command_prints_policies_side_by_side_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    options = [*files(tmp_path), "--policy", "makara,fixed", "--spot-price", "0.9", "--output", str(picture)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    said = ("makara", "fixed", "goodput", "whole steps done again", "VM-hours", "0.9 on the spot market")
    for expected in said:
        assert expected in printed
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files(tmp_path), "--json", "--hours", "0.5", "--notice", "60"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (outcome,) = answer["outcomes"]
    assert outcome["wall_s"] == 1800
    assert sum(outcome["seconds"].values()) == pytest.approx(1800)
    assert answer["costs"] == MorphCosts().to_json()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.csv", "0,add,a\n5,join,b\n", "trace.csv:2: 'join' is neither add nor remove"),
        ("trace.csv", "0,4\n", "trace: all its events are at its start"),
        ("calibration.json", "{}", "calibration.json:1: basis: is required"),
        ("job.yaml", "name: x\nsteps: 4\n", "steps"),
    ],
)
def test_the_command_refuses_bad_files_with_the_reason(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = files(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(options) == 2
    assert message in capsys.readouterr().err


def test_the_command_names_options_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = files(tmp_path)
    for extra, message in (
        (["--policy", "best"], "policy: 'best' is unknown"),
        (["--fixed-depth", "7", "--policy", "fixed"], "fixed-depth: 7 is not in 1..6"),
        (["--hours", "-1"], "hours: -1 is not a number > 0"),
        (["--notice", "nan"], "notice: nan is not a number of seconds >= 0"),
        (["--spot-price", "inf"], "spot price: inf is not an amount"),
        (["--costs", str(tmp_path / "none.json")], "none.json: cannot read"),
        (["--output", str(tmp_path / "none" / "p.svg")], "output: cannot write"),
    ):
        assert main([*options, *extra]) == 2
        assert message in capsys.readouterr().err
    assert main([*options[:5], "--home", str(tmp_path)]) == 2
    assert "calibration: give --calibration, or name a manager that has one" in capsys.readouterr().err


def test_what_does_not_go_together_names_the_field() -> None:
    with pytest.raises(ReplayError, match="global_batch_size: 16 is not divisible by the calibration's"):
        scenario("0,3\n", hours=1.0, calibration=uniform(6, microbatch_size=3))
    with pytest.raises(ReplayError, match="trace: it has no events"):
        scenario([], hours=1.0)
    events = [TraceEvent(0, NodeChange.ADD, "a")]
    with pytest.raises(ReplayError, match="spot price: -1"):
        replay(scenario(events, hours=1.0), prices=Prices(spot=-1.0))


def test_a_picture_is_the_same_for_the_same_outcomes_and_escapes_what_it_is_told() -> None:
    outcomes = replay(scenario(random_trace(3)), ("makara", "fixed"))
    text = draw(outcomes, "<job> & trace")
    assert text == draw(outcomes, "<job> & trace")
    root = ElementTree.fromstring(text)
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert titles[0] == "<job> & trace"
    marks = sum(len(outcome.morphs) for outcome in outcomes)
    assert len(titles) == 1 + marks + 2 * 8
