"""The journal: one transaction a decision, one manager a file, nothing lost when the process is killed."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.manager.core.commands import ReleaseVm, RequestVm
from makara.manager.core.facts import StopOrdered, VmRequested
from makara.manager.service.journal import JournalConflict, JournalError, JournalLocked, SqliteJournal
from makara.protocol.messages import StepMetrics


@contextlib.contextmanager
def opened(path: Path) -> Iterator[SqliteJournal]:
    journal = SqliteJournal(path / "journal.db")
    try:
        yield journal
    finally:
        journal.close()


def request(number: int) -> tuple[VmRequested, RequestVm]:
    vm = f"v{number}"
    return VmRequested(at=float(number), vm=vm), RequestVm(key=f"{vm}/request", vm=vm)


def test_facts_come_back_in_order_and_typed(tmp_path: Path) -> None:
    facts = [request(n)[0] for n in range(3)]
    with opened(tmp_path) as journal:
        assert journal.append("a", facts, []) == 3
        assert journal.append("b", [StopOrdered(at=9.0)], []) == 1
        assert journal.append("a", [StopOrdered(at=5.0)], []) == 4
    with opened(tmp_path) as journal:
        assert [f.fact for f in journal.facts("a")] == [*facts, StopOrdered(at=5.0)]
        assert [f.sequence for f in journal.facts("a", after=2)] == [3, 4]
        assert [f.sequence for f in journal.facts("a", limit=3)] == [2, 3, 4]
        assert [f.sequence for f in journal.facts("a", after=2, limit=3)] == [3, 4]
        assert [f.sequence for f in journal.facts("a", after=2, limit=1)] == [4]
        assert journal.jobs() == ["a", "b"]


def test_commands_are_pending_until_done_and_stored_once(tmp_path: Path) -> None:
    fact, command = request(1)
    release = ReleaseVm(key="v1/release", vm="v1")
    with opened(tmp_path) as journal:
        journal.append("a", [fact], [command, release])
        journal.append("a", [], [command])
        assert [(p.job, p.command) for p in journal.pending_commands()] == [("a", command), ("a", release)]
        journal.mark_done(command.key)
    with opened(tmp_path) as journal:
        assert [p.command for p in journal.pending_commands()] == [release]
        journal.append("a", [], [command])
        assert [p.command for p in journal.pending_commands()] == [release]


def test_two_managers_on_one_journal_are_found_out(tmp_path: Path) -> None:
    fact, command = request(1)
    with opened(tmp_path) as journal:
        journal.append("a", [fact], [], expected=0)
        with pytest.raises(JournalConflict, match="at fact 1, expected 0"):
            journal.append("a", [fact], [command], expected=0)
        assert len(journal.facts("a")) == 1
        assert journal.pending_commands() == []
        with pytest.raises(JournalLocked, match="held by another manager"):
            SqliteJournal(tmp_path / "journal.db")


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal._db.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="schema 99"):
        SqliteJournal(tmp_path / "journal.db")
    # The refusal let go of the lock.
    with pytest.raises(JournalError, match="schema 99"):
        SqliteJournal(tmp_path / "journal.db")


def test_metrics_keep_the_newest_generation_of_each_step(tmp_path: Path) -> None:
    def row(step: int, generation: int, loss: float) -> StepMetrics:
        return StepMetrics(
            step=step, generation=generation, loss=loss, grad_norm=1.0, seconds=0.5, samples=64
        )

    with opened(tmp_path) as journal:
        journal.record_metrics("a", [row(1, 1, 5.0), row(2, 1, 4.0), row(3, 1, math.nan)])
        journal.record_metrics("a", [row(2, 2, 3.5), row(1, 0, 9.0)])
        assert [(m.step, m.loss) for m in journal.metrics("a")][:2] == [(1, 5.0), (2, 3.5)]
        assert math.isnan(journal.metrics("a", after=2)[0].loss)
        assert [m.step for m in journal.metrics("a", limit=2)] == [2, 3]
        skipped = row(4, 2, 3.0).model_copy(update={"loss_scale": 2.0**15, "skipped": True})
        journal.record_metrics("a", [skipped])
        assert journal.metrics("a", after=3) == [skipped]
        assert journal.metrics("b") == []


def test_threads_take_turns(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:

        def write(job: str) -> None:
            for number in range(20):
                journal.append(job, [request(number)[0]], [], expected=number)

        threads = [threading.Thread(target=write, args=(job,)) for job in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(journal.facts(job)) for job in "abc"] == [20, 20, 20]


_WRITER = """
import sys
from pathlib import Path
from makara.manager.core.commands import RequestVm
from makara.manager.core.facts import VmRequested
from makara.manager.service.journal import SqliteJournal
journal = SqliteJournal(Path(sys.argv[1]))
number = len(journal.facts("a"))
while True:
    names = [f"v{number + n}" for n in range(3)]
    facts = [VmRequested(at=1.0, vm=name) for name in names]
    commands = [RequestVm(key=name + "/request", vm=name) for name in names]
    number = journal.append("a", facts, commands, expected=number)
    print(number, flush=True)
"""


def test_nothing_acknowledged_is_lost_and_nothing_is_half_written_after_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    acknowledged = 0
    for round_number in range(4):
        command = [sys.executable, "-c", _WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(5 + 7 * round_number):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)  # in the middle of whatever it does now
            rest = writer.stdout.read().splitlines()
        acknowledged = max([acknowledged, *(int(line) for line in rest if line)])
        with opened(tmp_path) as journal:
            facts, commands = journal.facts("a"), journal.pending_commands()
            assert len(facts) >= acknowledged
            assert len(facts) % 3 == 0
            assert [f.sequence for f in facts] == list(range(1, len(facts) + 1))
            assert [c.command.key for c in commands] == [f"{f.fact.vm}/request" for f in facts]
