"""Real trainers before there is a recipe: generations of kind `profile`, which they measure the model in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makara.checkpoint import open_store, save_calibration
from makara.protocol.messages import GenerationOrder, Member, Phase, Profile, Profiling
from makara.simulator import Measurements
from makara.worker.profiling.probe import pairs_of, rings_of
from trainer_processes import TIMEOUT_S, Fleet, settings


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, settings(tmp_path, entrypoint="models:untied_mlp"), None)
    yield made
    made.close()


def told(fleet: Fleet, worker: str) -> Profiling:
    report = fleet.reports.get(worker)
    return Profiling() if report is None or report.profiling is None else report.profiling


def prepare(fleet: Fleet, number: int, *workers: str, without: str | None = None) -> GenerationOrder:
    """Have them get ready, as the manager does; `without` never hears of it. Returns the order to go."""
    members = [Member(worker=worker, address="127.0.0.1") for worker in workers]
    order = GenerationOrder.of(members, number=number, kind="profile", phase="prepare", key="k")
    ready = [worker for worker in workers if worker != without]
    fleet.send(*ready, action="profile", generation=order)
    fleet.wait(lambda: all(told(fleet, worker).prepared == number for worker in ready))
    assert [told(fleet, worker).endpoint is not None for worker in ready][1:] == [False] * (len(ready) - 1)
    return order.model_copy(update={"phase": "go", "endpoint": told(fleet, workers[0]).endpoint})


def go(fleet: Fleet, order: GenerationOrder, *workers: str, **changes: Any) -> None:
    bounds = {
        "measuring_s": TIMEOUT_S,
        "probe_s": TIMEOUT_S,
    }  # not those of a machine with nothing else to do
    fleet.send(*workers, action="profile", generation=order, **{**bounds, **changes})


def begin(fleet: Fleet, number: int, *workers: str, without: str | None = None, **changes: Any) -> None:
    order = prepare(fleet, number, *workers, without=without)
    go(fleet, order, *(worker for worker in workers if worker != without), **changes)


def ended(fleet: Fleet, number: int, *workers: str) -> bool:
    return all(
        told(fleet, worker).generation == number and fleet.reports[worker].phase is Phase.IDLE
        for worker in workers
    )


def found_by(fleet: Fleet, worker: str) -> Measurements:
    profile = profile_of(fleet, worker)
    return Measurements.from_json(profile.measurements or {})


def profile_of(fleet: Fleet, worker: str) -> Profile:
    found = fleet.reports[worker].profile
    assert found is not None
    return found


def test_one_alone_measures_all_and_links_are_assumed(fleet: Fleet) -> None:
    fleet.start("a.0")
    begin(fleet, 1, "a.0")
    fleet.wait(lambda: ended(fleet, 1, "a.0"))
    measured = found_by(fleet, "a.0")
    assert [wire.source for wire in measured.wires] == ["loopback"]
    assert told(fleet, "a.0").done == told(fleet, "a.0").total > 0
    fleet.recipe = profile_of(fleet, "a.0").recipe
    fleet.send("a.0")
    graph_hash = fleet.recipe.graph_hash
    fleet.wait(lambda: fleet.has("a.0", graph_hash=graph_hash, profile=None, profiling=None))


def test_several_measure_their_links_and_sums_too_and_rank_0_tells(fleet: Fleet) -> None:
    workers = ["a.0", "a.1", "b.0"]
    fleet.start(*workers)
    begin(fleet, 1, *workers)
    fleet.wait(lambda: ended(fleet, 1, *workers))
    assert not any(told(fleet, worker).broken for worker in workers)
    assert [fleet.reports[worker].profile is not None for worker in workers] == [True, False, False]
    measured = found_by(fleet, "a.0")
    assert sorted(wire.same_vm for wire in measured.wires) == [False, True]
    assert all(wire.loaded and wire.source == "workers" for wire in measured.wires)
    sums = measured.allreduces
    assert {(entry.same_vm, entry.ring) for entry in sums} == {(True, 2), (False, 2)}
    assert {entry.in_flight for entry in sums} == {1, 2}
    assert len({entry.size_bytes for entry in sums}) > 1


def test_a_newcomer_gets_what_was_measured_before_it_came(fleet: Fleet) -> None:
    fleet.start("a.0", "b.0")
    begin(fleet, 1, "a.0")
    fleet.wait(lambda: ended(fleet, 1, "a.0"))
    before = found_by(fleet, "a.0")
    begin(fleet, 2, "a.0", "b.0")
    fleet.wait(lambda: ended(fleet, 2, "a.0", "b.0"))
    after = found_by(fleet, "a.0")
    assert after.rows[0].figures == before.rows[0].figures
    assert [wire.source for wire in after.wires] == ["workers"]
    assert told(fleet, "b.0").done == 0
    fleet.kill("a.0")  # what it alone had measured lives on
    begin(fleet, 3, "b.0")
    fleet.wait(lambda: ended(fleet, 3, "b.0"))
    assert found_by(fleet, "b.0").rows[0].figures == before.rows[0].figures


def test_one_that_is_at_its_survey_is_waited_for(fleet: Fleet) -> None:
    """Longer than a link may be silent: it looks at orders when it is done."""
    fleet.start("a.0", "b.0")
    begin(fleet, 1, "a.0")
    fleet.wait(lambda: ("a.0", Phase.PROFILING) in fleet.seen)
    begin(fleet, 2, "a.0", "b.0")
    fleet.wait(lambda: ended(fleet, 2, "a.0", "b.0"))
    assert [wire.source for wire in found_by(fleet, "a.0").wires] == ["workers"]


def test_what_is_in_the_store_is_a_profile_at_once(fleet: Fleet) -> None:
    fleet.start("a.0")
    begin(fleet, 1, "a.0")
    fleet.wait(lambda: ended(fleet, 1, "a.0"))
    measured = found_by(fleet, "a.0")
    assert measured.basis is not None
    store = open_store(fleet.job.store.uri)
    save_calibration(store, measured.basis.fingerprint, measured.to_text())
    fleet.start("b.0", "c.0")
    begin(fleet, 1, "b.0", "c.0")
    fleet.wait(lambda: ended(fleet, 1, "b.0", "c.0"))
    assert profile_of(fleet, "b.0").stored
    assert found_by(fleet, "b.0") == measured


@pytest.mark.parametrize("fault", ["never comes", "dies"])
def test_one_that_comes_to_nothing_is_left_and_the_next_one_works(fleet: Fleet, fault: str) -> None:
    fleet.start("a.0", "b.0", "c.0")
    order = prepare(fleet, 1, "a.0", "b.0", "c.0", without="c.0" if fault == "never comes" else None)
    if fault == "dies":
        fleet.signal(signal.SIGSTOP, "c.0")
    go(fleet, order, "a.0", "b.0")
    fleet.wait_phase(Phase.PROFILING, "a.0", "b.0")
    if fault == "dies":
        fleet.kill("c.0")
    fleet.send("a.0", "b.0", action="idle")  # the manager has closed it
    fleet.wait(lambda: ended(fleet, 1, "a.0", "b.0"))
    assert fleet.reports["a.0"].profile is None
    begin(fleet, 2, "a.0", "b.0")
    fleet.wait(lambda: ended(fleet, 2, "a.0", "b.0"))
    assert found_by(fleet, "a.0").wires


def test_links_that_take_too_long_break_it_and_the_sections_are_kept(fleet: Fleet) -> None:
    fleet.start("a.0", "b.0")
    begin(fleet, 1, "a.0", "b.0", probe_s=0.001)
    fleet.wait(lambda: ended(fleet, 1, "a.0", "b.0"))
    assert any(
        "the measuring of links is not over in 0.001 s" in told(fleet, w).broken for w in ("a.0", "b.0")
    )
    assert fleet.reports["a.0"].profile is None
    done = [told(fleet, worker).done for worker in ("a.0", "b.0")]
    begin(fleet, 2, "a.0")
    fleet.wait(lambda: ended(fleet, 2, "a.0"))
    assert [told(fleet, worker).done for worker in ("a.0", "b.0")] == done
    assert [wire.source for wire in found_by(fleet, "a.0").wires] == ["loopback"]


def test_pairs_and_rings_cover_what_there_is() -> None:
    assert pairs_of(["a", "a", "b", "b"]) == [(0, 1), (0, 2), (1, 3)]
    assert pairs_of(["a", "b", "c", "d"]) == [(0, 1), (2, 3)]
    assert pairs_of(["a", "a"]) == [(0, 1)]
    assert rings_of(["a", "a", "a", "b", "c"]) == [(0, 1), (0, 1, 2), (0, 3), (0, 3, 4)]
    assert rings_of(["a", "b"]) == [(0, 1)]
