"""Timelines of a simulated step: the Gantt chart, and the trace for ui.perfetto.dev."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from calibrations import uniform
from hypothesis import given, settings
from makara.pipeline import Kind, Plan, grid
from makara.simulator import Link, simulate
from makara.simulator.timeline import Timeline, chrome_trace, draw, timeline_of
from makara.simulator.timeline.svg import ticks
from makara.simulator.units import seconds, size
from plans import crossing_plans, grids, stages

LINK = Link(latency_s=0.1, bytes_per_s=50.0)


def timeline(plan: Plan, vm_of: Sequence[str] | None = None) -> Timeline:
    step = simulate(plan, uniform(plan.num_sections, inter_vm=LINK), vm_of=vm_of)
    return timeline_of(plan, step, job="gpt", microbatch_size=2, vm_of=vm_of)


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter() if node.text]


# ---- the picture -------------------------------------------------------------------------------------------


def test_the_picture_has_every_operation_sum_commit_and_update() -> None:
    plan = grid(stages(3), 2, 5, recompute=True)
    shown = texts(draw(timeline(plan)))
    tasks = Counter(text.partition(":")[0] for text in shown)
    for path in plan.paths:
        for micro_batch in path.micro_batches:
            for stage in range(3):
                assert tasks[f"{stage}F{micro_batch}"] == tasks[f"{stage}B{micro_batch}"] == 1
                assert tasks[f"{stage}R{micro_batch}"] == (stage < 2)
    assert Counter(text.rpartition(":")[0] for text in shown) >= Counter(
        {"tally": 6, "sum of section 0": 2, "sum of section 2": 2, "commit": 6, "update": 6}
    )
    assert "gpt: P×D = 3×2, one step in " + seconds(timeline(plan).time_s) in shown
    assert any(
        "N = 5 micro-batches of 2; schedule varuna; window unbounded; recomputation" in t for t in shown
    )
    assert Counter(shown)["stage 2"] == 2


def test_equal_steps_give_equal_pictures() -> None:
    plan = grid(stages(2), 2, 4)
    assert draw(timeline(plan)) == draw(timeline(plan))
    assert chrome_trace(timeline(plan)) == chrome_trace(timeline(plan))


def test_thousands_of_micro_batches_on_many_workers_stay_readable() -> None:
    plan = grid(stages(12), 6, 3000, window=36)
    picture = draw(timeline(plan))
    shown = texts(picture)
    assert len(picture) < 2_000_000
    assert len(list(ElementTree.fromstring(picture).iter())) < 10_000
    assert len([text for text in shown if text.startswith("Close up: ")]) == 3
    assert "replica 0, and 5 more like it" in shown
    assert "stage 11" in shown


def test_memory_over_time_is_below_each_lane() -> None:
    plan = grid(stages(2), 1, 3)
    lanes = timeline(plan).lanes
    areas = [
        node.attrib["points"].split()
        for node in ElementTree.fromstring(draw(timeline(plan))).iter()
        if node.tag.endswith("polygon")
    ]
    assert len(areas) == len(lanes)
    heights = [{float(point.split(",")[1]) for point in area} for area in areas]
    for lane, found in zip(lanes, heights, strict=True):
        # The floor, and a height for each amount that the worker holds at some time.
        assert len(found) == 1 + len({held for _, held in lane.memory})


@given(grids() | crossing_plans())
@settings(max_examples=40)
def test_of_alike_pipelines_one_is_shown_and_no_worker_is_forgotten(plan: Plan) -> None:
    whole = timeline(plan)
    assert sorted(lane.worker for lane in whole.lanes) == list(range(plan.num_workers))
    for most in (1, 3, 100):
        folded = whole.folded(most)
        counted = sum(len(pipeline.lanes) * (1 + pipeline.alike) for pipeline in folded.pipelines)
        assert counted + folded.num_left_out == len(whole.lanes)
        assert len(folded.pipelines) == 1 or len(folded.lanes) <= most
    ElementTree.fromstring(draw(whole))


# ---- the trace ---------------------------------------------------------------------------------------------


def events_of(plan: Plan, vm_of: Sequence[str] | None = None) -> list[dict[str, Any]]:
    value = json.loads(chrome_trace(timeline(plan, vm_of)))
    assert value["displayTimeUnit"] in ("ms", "ns")  # the only two that the format knows
    return value["traceEvents"]


def test_the_trace_has_the_fields_of_the_trace_event_format() -> None:
    events = events_of(grid(stages(3), 2, 5, recompute=True), ["a", "a", "b", "c", "d", "e"])
    needed = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "M": {"args"}, "s": {"ts", "tid", "id", "cat"}}
    needed["f"] = needed["s"] | {"bp"}
    for event in events:
        assert needed[event["ph"]] | {"name", "pid", "ph"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert {"replica 0", "replica 1", "stage 0 on a", "stage 2 on b", "stage 0: sums"} <= names


@given(grids() | crossing_plans())
@settings(max_examples=30)
def test_slices_of_a_thread_follow_each_other_and_arrows_join_slices(plan: Plan) -> None:
    events = events_of(plan)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for slices in threads.values():
        slices.sort()
        for (_, stop), (start, _) in itertools.pairwise(slices):
            assert start >= stop - 1e-6
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            assert arrows.setdefault(event["id"], {}).setdefault(event["ph"], event) is event
    for arrow in arrows.values():
        leaves, arrives = arrow["s"], arrow["f"]
        assert leaves["ts"] < arrives["ts"]
        assert any(start <= leaves["ts"] < stop for start, stop in threads[leaves["pid"], leaves["tid"]])
        assert any(start == arrives["ts"] for start, _ in threads[arrives["pid"], arrives["tid"]])
    crossings = sum(
        2 * len(path.micro_batches)
        for path in plan.paths
        for one, other in itertools.pairwise(path.hops)
        if one.worker != other.worker
    )
    assert len(arrows) == crossings


def test_the_trace_has_the_times_and_the_memory_of_the_simulation() -> None:
    plan = grid(stages(2), 1, 4)
    step = simulate(plan, uniform(2, inter_vm=LINK))
    events = events_of(plan)
    took = {
        tid: sum(e["dur"] for e in events if e["ph"] == "X" and e["tid"] == tid and e["cat"] != "commit")
        / 1e6
        for tid in (1, 3)
    }
    assert [took[1], took[3]] == pytest.approx(list(step.busy_s))
    for worker, held in enumerate(step.memory):
        counted = [e["args"]["bytes"] for e in events if e["name"] == f"memory of stage {worker}"]
        assert counted == [size_bytes for _, size_bytes in held]
    forwards = [e for e in events if e["ph"] == "X" and e["cat"] == "forward" and e["tid"] == 1]
    assert [e["name"] for e in forwards] == ["F0", "F1", "F2", "F3"]
    assert forwards[0]["args"] == {"micro_batch": 0, "stage": 0, "sections": "0..0"}
    assert {Kind.FORWARD.value} == {e["name"][0] for e in forwards}


# ---- numbers -----------------------------------------------------------------------------------------------


def test_numbers_are_written_with_three_digits_and_their_unit() -> None:
    assert [seconds(s) for s in (0, 62.37, 0.0031, 1e-6, 120)] == [
        "0 s",
        "62.4 s",
        "3.10 ms",
        "1.00 µs",
        "120 s",
    ]
    assert [size(b) for b in (12, 3_000_000, 16e9)] == ["12 B", "3.00 MB", "16.0 GB"]
    assert ticks(0, 46.6, 12) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert ticks(1.2, 1.3, 4) == pytest.approx([1.2, 1.25, 1.3])
    assert ticks(2, 2, 5) == [2]
