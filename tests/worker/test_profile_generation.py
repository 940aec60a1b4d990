"""A generation of kind `profile` as its members live it: who measures what, and what a loss leaves behind.

Members are threads of this process with links over loopback; the model that they measure is made up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from makara.protocol.messages import (
    GenerationOrder,
    JobSettings,
    Member,
    Orders,
    Phase,
    Profile,
)
from makara.protocol.survey import Layout, SectionRow
from makara.simulator import Measurements
from makara.worker.execution.blocking import PeersLost
from makara.worker.execution.communicator import Communicator, OpenGroup
from makara.worker.execution.gloo import GroupBroken, Listener, Store, connect
from makara.worker.profiling.generation import MeasuredSoFar, measure_together
from makara.worker.progress import ProgressCounters
from makara.worker.trainer.measurer import Measurer
from trainer_processes import TIMEOUT_S, settings
from world_machines import SURVEY, row

ALL = [(m, section) for m in (1, 2) for section in range(3)]
LEFT = [part for part in ALL if part != (2, 1)]  # what the survey has not measured
WORKERS = ["a.0", "b.0"]


class Subject:
    """Notes what is measured of it."""

    def __init__(self, folder: Path) -> None:
        self.job = settings(folder, microbatch_size=None, global_batch_size=8)
        self.device = torch.device("cpu")
        self.measured: list[tuple[int, int]] = []
        self._m = 0

    def cut_exactly(self, layout: Layout) -> None:
        self._m = layout.microbatch_size

    def measure(self, section: int, section_s: float) -> SectionRow:
        self.measured.append((self._m, section))
        return row(self._m, section)


def go(number: int, workers: Sequence[str], endpoint: str) -> GenerationOrder:
    members = [Member(worker=worker, address="127.0.0.1") for worker in workers]
    return GenerationOrder.of(members, number=number, kind="profile", phase="go", endpoint=endpoint, key="k")


def communicators(*workers: str) -> list[Communicator]:
    listener = Listener("127.0.0.1")
    listener.serve()
    order = go(1, workers, listener.endpoint)
    return [
        Communicator(order.told_to([worker]), worker, listener if rank == 0 else None, TIMEOUT_S)
        for rank, worker in enumerate(workers)
    ]


def measure(
    subjects: Sequence[Subject], known: Sequence[MeasuredSoFar], measuring_s: float = TIMEOUT_S
) -> Measurements:
    """What rank 0 finds when members with these do all that there is to do."""

    def lives(comm: Communicator, subject: Any, known: MeasuredSoFar) -> Profile | None:
        try:
            return measure_together(comm, subject, known, unheard, measuring_s=measuring_s, probe_s=TIMEOUT_S)
        finally:
            comm.close()

    comms = communicators(*WORKERS[: len(subjects)])
    with ThreadPoolExecutor(len(comms)) as members:
        first, *others = members.map(lives, comms, subjects, known)
    assert others == [None] * len(others)
    assert first is not None
    return Measurements.from_json(first.measurements or {})


def unheard(stage: str, done: int, total: int) -> None:
    """What a member tells of its progress."""


def surveyed() -> MeasuredSoFar:
    known = MeasuredSoFar()
    known.take(SURVEY)
    return known


def test_each_section_is_measured_by_one_member_and_all_know_all(tmp_path: Path) -> None:
    subjects = [Subject(tmp_path), Subject(tmp_path)]
    known = [MeasuredSoFar(), surveyed()]  # whoever brings a survey: the others go on from it
    found = measure(subjects, known)
    assert found.sizes == (1, 2)
    assert [wire.source for wire in found.wires] == ["workers"]
    assert all(subject.measured for subject in subjects)
    assert sorted(subjects[0].measured + subjects[1].measured) == LEFT
    assert [sorted(each.rows) for each in known] == [LEFT, LEFT]
    assert [each.own for each in known] == [len(subject.measured) for subject in subjects]


def test_what_a_member_knows_is_not_measured_again(tmp_path: Path) -> None:
    survivor, known = Subject(tmp_path), surveyed()
    known.rows = {part: row(*part) for part in LEFT[:2]}
    found = measure([survivor], [known])
    assert sorted(survivor.measured) == LEFT[2:]
    assert found.sizes == (1, 2)
    assert [wire.source for wire in found.wires] == ["loopback"]


def test_an_m_that_can_be_missed_is_not_waited_for(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    found = measure([subject], [surveyed()], measuring_s=-1.0)
    assert found.sizes == (SURVEY.recipe.microbatch_size,)
    assert sorted(subject.measured) == [(2, 0), (2, 2)]


def test_members_exchange_more_than_a_store_takes_for_one_value() -> None:
    comms = communicators(*WORKERS)
    value = [row(1, section).model_dump(mode="json") for section in range(20_000)]

    def gathers(comm: Communicator) -> list[Any]:
        comm.rendezvous()
        try:
            return comm.gather("rows", value if comm.rank == 1 else None)
        finally:
            comm.close()

    with ThreadPoolExecutor(2) as members:
        assert list(members.map(gathers, comms)) == [[None, value]] * 2


def test_a_script_that_comes_to_no_end_is_given_up_and_its_thread_woken() -> None:
    comms, woken = communicators(*WORKERS), threading.Semaphore(0)

    def lives(comm: Communicator) -> None:
        comm.rendezvous()

        def script(store: Store, open_group: OpenGroup) -> None:
            group = open_group("pair", [0, 1])
            try:
                group.receive(torch.zeros(1), 1 - comm.rank, 7)  # nobody sends
            except GroupBroken:
                woken.release()
                raise

        try:
            comm.run(script, 1.0, "this is")
        finally:
            comm.close()

    with ThreadPoolExecutor(2) as members:
        outcomes = [members.submit(lives, comm) for comm in comms]
        for outcome in outcomes:
            with pytest.raises(PeersLost):
                outcome.result(TIMEOUT_S)
    assert woken.acquire(timeout=TIMEOUT_S)
    assert woken.acquire(timeout=TIMEOUT_S)


class Control:
    """What a trainer tells its agent."""

    def __init__(self) -> None:
        self.progress = ProgressCounters()
        self.orders: Orders | None = None
        self.told: list[dict[str, Any]] = []

    def report(self, **changes: Any) -> None:
        self.told.append(changes)


def test_orders_that_both_threads_look_at_are_prepared_for_once(tmp_path: Path) -> None:
    control: Any = Control()
    measurer = Measurer("a.0", "127.0.0.1", control)
    both = threading.Barrier(2)
    for number in range(1, 30):
        order = go(number, ["a.0"], "").model_copy(update={"phase": "prepare"})
        orders = Orders(version=number, action="profile", job=settings(tmp_path), generation=order)

        def hears(orders: Orders = orders) -> None:
            both.wait(TIMEOUT_S)
            measurer.on_orders(orders)

        with ThreadPoolExecutor(2) as threads:
            for hearing in [threads.submit(hears), threads.submit(hears)]:
                hearing.result()
    told = [changes["profiling"] for changes in control.told]
    assert [profiling.prepared for profiling in told] == list(range(1, 30))
    connect(told[-1].endpoint, TIMEOUT_S)  # it listens there
    measurer.finish()


def test_a_member_that_goes_into_the_next_one_is_not_at_its_links_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control: Any = Control()
    measurer = Measurer("a.0", "127.0.0.1", control)
    job = settings(tmp_path)

    def breaks(
        comm: Communicator, _subject: Any, known: MeasuredSoFar, on_progress: Any, **_bounds: float
    ) -> None:
        known.take(SURVEY)
        on_progress("links", 0, 6)
        raise PeersLost([1], "a test")

    def subject_of(training: object, job: JobSettings) -> None: ...

    monkeypatch.setattr("makara.worker.trainer.measurer.measure_together", breaks)
    monkeypatch.setattr("makara.worker.trainer.measurer.subject_of", subject_of)
    stages: list[tuple[int, str, Phase]] = []
    for number in (1, 2):
        prepare = go(number, ["a.0"], "").model_copy(update={"phase": "prepare"})
        control.orders = Orders(version=1, action="profile", job=job, generation=prepare)
        measurer.on_orders(control.orders)
        endpoint = control.told[-1]["profiling"].endpoint
        control.orders = Orders(
            version=2, action="profile", job=job, generation=go(number, ["a.0"], endpoint)
        )
        before = len(control.told)
        measurer.work(control.orders, None)  # pyright: ignore[reportArgumentType]
        told = control.told[before]
        stages.append((told["profiling"].generation, told["profiling"].stage, told["phase"]))
    assert stages == [(1, "survey", Phase.PROFILING), (2, "sections", Phase.PROFILING)]
    measurer.finish()
