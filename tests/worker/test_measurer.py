"""Real trainers before there is a recipe: surveys, shares, and links that they measure together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.checkpoint import open_store, save_calibration
from makara.protocol.messages import MeasureOrder, Member, Phase, ProbeOrder, ProbeReport, Survey
from makara.simulator import AllReduce, Measurements, Wire
from makara.simulator.calibration.assembly import done_in, left, measurements_of
from makara.worker.profiling.probe import pairs_of, rings_of
from trainer_processes import Fleet, settings


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, settings(tmp_path, entrypoint="models:untied_mlp"), None)
    yield made
    made.close()


def surveyed(fleet: Fleet, worker: str) -> Survey:
    fleet.send(worker, action="profile", profile_worker=worker)
    fleet.wait(lambda: fleet.has(worker, survey=True, phase=Phase.IDLE))
    found = fleet.reports[worker].survey
    assert found is not None
    return found


def probe(fleet: Fleet, number: int, *workers: str, without: str | None = None) -> None:
    """Have them measure links, as the manager does; `without` never hears of it."""
    members = [Member(worker=worker, address="127.0.0.1") for worker in workers]
    order = ProbeOrder(number=number, members=members)
    told = [worker for worker in workers if worker != without]
    fleet.send(*told, action="profile", probe=order)
    fleet.wait(lambda: fleet.has(workers[0], probe=True) and reported(fleet, workers[0]).number == number)
    order = order.model_copy(update={"endpoint": reported(fleet, workers[0]).endpoint})
    fleet.send(*told, action="profile", probe=order)


def reported(fleet: Fleet, worker: str) -> ProbeReport:
    report = fleet.reports[worker].probe
    assert report is not None
    return report


def probed(fleet: Fleet, worker: str, number: int) -> bool:
    report = fleet.reports[worker].probe
    return report is not None and report.number == number and report.done


def test_a_model_is_surveyed_by_one_and_measured_by_another(fleet: Fleet) -> None:
    fleet.start("a.0", "b.0")
    found = surveyed(fleet, "a.0")
    layout = found.layouts[0]
    assert not left(layout, done_in(found.rows))  # a small model is done at once
    part = found.model_copy(update={"rows": [row for row in found.rows if row.section > 1]})
    order = MeasureOrder(worker="b.0", layout=layout, sections=[0, 1], section_s=0.01)
    fleet.send("b.0", action="profile", measure=[order])
    fleet.wait(lambda: fleet.has("b.0", rows=True, phase=Phase.IDLE))
    rows = fleet.reports["b.0"].rows
    assert [row.section for row in rows] == [0, 1]
    assert measurements_of(part, rows, [], []).at(2).num_sections == len(layout.cuts) + 1
    fleet.recipe = found.recipe
    fleet.send("a.0", "b.0")
    fleet.wait(lambda: fleet.has("b.0", graph_hash=found.recipe.graph_hash, rows=[]))


def test_what_is_in_the_store_is_a_profile_at_once(fleet: Fleet) -> None:
    fleet.start("a.0")
    found = surveyed(fleet, "a.0")
    measured = measurements_of(found, [], [], [])
    assert measured.basis is not None
    store = open_store(fleet.job.store.uri)
    save_calibration(store, measured.basis.fingerprint, measured.to_text())
    fleet.start("b.0")
    fleet.send("b.0", action="profile", profile_worker="b.0")
    fleet.wait(lambda: fleet.has("b.0", profile=True, phase=Phase.IDLE))
    profile = fleet.reports["b.0"].profile
    assert profile is not None
    assert profile.stored
    assert Measurements.from_json(profile.measurements or {}) == measured


def test_workers_measure_their_links_and_sums_together(fleet: Fleet) -> None:
    workers = ["a.0", "a.1", "b.0"]
    fleet.start(*workers)
    probe(fleet, 1, *workers)
    fleet.wait(lambda: all(probed(fleet, worker, 1) for worker in workers))
    found = reported(fleet, "a.0")
    assert not found.failure
    wires = [Wire.from_json(wire, "") for wire in found.wires]
    assert sorted(wire.same_vm for wire in wires) == [False, True]
    assert all(wire.loaded and wire.source == "workers" for wire in wires)
    sums = [AllReduce.from_json(entry, "") for entry in found.allreduces]
    assert {(entry.same_vm, entry.ring) for entry in sums} == {(True, 2), (False, 2)}
    assert {entry.in_flight for entry in sums} == {1, 2}
    assert len({entry.size_bytes for entry in sums}) > 1


@pytest.mark.parametrize("fault", ["never comes", "dies"])
def test_a_probe_that_comes_to_nothing_is_given_up_and_the_next_one_works(fleet: Fleet, fault: str) -> None:
    fleet.start("a.0", "b.0", "c.0")
    if fault == "dies":
        fleet.signal(signal.SIGSTOP, "c.0")
    probe(fleet, 1, "a.0", "b.0", "c.0", without="c.0" if fault == "never comes" else None)
    fleet.wait_phase(Phase.PROFILING, "a.0", "b.0")
    if fault == "dies":
        fleet.kill("c.0")
    fleet.send("a.0", "b.0", action="profile")  # the manager has given it up
    fleet.wait(lambda: probed(fleet, "a.0", 1) and probed(fleet, "b.0", 1))
    assert reported(fleet, "a.0").failure
    probe(fleet, 2, "a.0", "b.0")
    fleet.wait(lambda: probed(fleet, "a.0", 2) and probed(fleet, "b.0", 2))
    assert reported(fleet, "a.0").wires


def test_pairs_and_rings_cover_what_there_is() -> None:
    assert pairs_of(["a", "a", "b", "b"]) == [(0, 1), (0, 2), (1, 3)]
    assert pairs_of(["a", "b", "c", "d"]) == [(0, 1), (2, 3)]
    assert pairs_of(["a", "a"]) == [(0, 1)]
    assert rings_of(["a", "a", "a", "b", "c"]) == [(0, 1), (0, 1, 2), (0, 3), (0, 3, 4)]
    assert rings_of(["a", "b"]) == [(0, 1)]
