"""The journal: stores facts and the commands they caused in one transaction, before they are carried out."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sqlite3
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic import TypeAdapter

from ...protocol.messages import StepMetrics
from ..core.commands import Command
from ..core.facts import Fact
from ..core.facts.old import translated
from .journal_text import Unreadable, read_back, readable_text

SCHEMA_VERSION = 2
_CLOSE_S = 5.0
_PAGE_BYTES = 4 << 20
_FACTS: TypeAdapter[Fact] = TypeAdapter(Fact)
_COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)

_SCHEMA = """
CREATE TABLE facts (
    job TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    at REAL NOT NULL,
    fact TEXT NOT NULL,
    PRIMARY KEY (job, sequence)
) STRICT, WITHOUT ROWID;
CREATE TABLE commands (
    ordinal INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL,
    command TEXT NOT NULL,
    done INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX commands_pending ON commands (ordinal) WHERE done = 0;
CREATE TABLE metrics (
    job TEXT NOT NULL,
    step INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    loss REAL,
    grad_norm REAL,
    seconds REAL NOT NULL,
    samples INTEGER NOT NULL,
    loss_scale REAL,
    skipped INTEGER NOT NULL,
    PRIMARY KEY (job, step)
) STRICT, WITHOUT ROWID;
"""

_METRICS = ("step", "generation", "loss", "grad_norm", "seconds", "samples", "loss_scale", "skipped")


class JournalError(Exception):
    """The journal cannot be used; the message names the file and why."""


class JournalLocked(JournalError):
    """Another manager uses this journal."""


class JournalConflict(JournalError):
    """Another process appended facts since this manager read the journal."""


class StoredFact(NamedTuple):
    sequence: int  # 1 is the job's first
    fact: Fact | Unreadable


class PendingCommand(NamedTuple):
    job: str
    command: Command | Unreadable


class ThinnedMetrics(NamedTuple):
    """Some rows, in order of step; how many there are in all, and how many of these updated nothing."""

    rows: list[StepMetrics]
    num_rows: int
    num_skipped: int


class SqliteJournal:
    """A manager's durable memory in one SQLite file: every change is durable when its method returns.

    One manager holds it at a time, through a lock beside it. Safe to call from several threads; calls take
    turns. Raises `JournalLocked` when another process has it open and `JournalError` when the file is of
    another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = hold(path)
        self._mutex = threading.Lock()
        self._reading = threading.Lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._prepare()
            # A separate connection for reading, so that reading a long history does not delay writes.
            self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._reader.execute("PRAGMA query_only = ON")
        except BaseException:
            self._lock_file.close()
            raise

    def append(
        self, job: str, facts: Sequence[Fact], commands: Sequence[Command], expected: int | None = None
    ) -> int:
        """Store facts and commands in one transaction; returns the job's newest sequence number.

        `expected`: the sequence number of the caller's state. A command whose key is stored already is not
        stored again. Stores nothing and raises `JournalConflict` if the journal has another sequence number,
        `NotReadable` if a value would not read back as it is.
        """
        fact_texts = [(fact.at, readable_text(_FACTS, fact)) for fact in facts]
        command_texts = [(command.key, job, readable_text(_COMMANDS, command)) for command in commands]
        with self._transaction() as db:
            row = db.execute("SELECT coalesce(max(sequence), 0) FROM facts WHERE job = ?", (job,)).fetchone()
            newest = int(row[0])
            if expected is not None and newest != expected:
                raise JournalConflict(f"{self.path}: job {job} is at fact {newest}, expected {expected}")
            db.executemany(
                "INSERT INTO facts (job, sequence, at, fact) VALUES (?, ?, ?, ?)",
                [(job, newest + n, at, text) for n, (at, text) in enumerate(fact_texts, 1)],
            )
            db.executemany(
                "INSERT INTO commands (key, job, command) VALUES (?, ?, ?) ON CONFLICT (key) DO NOTHING",
                command_texts,
            )
        return newest + len(facts)

    def facts(self, job: str, after: int = 0, limit: int | None = None) -> list[StoredFact]:
        """The newest `limit` facts of a job after sequence number `after`, in order."""
        rows = self._read(
            "SELECT sequence, at, fact FROM facts WHERE job = ? AND sequence > ?"
            " ORDER BY sequence DESC LIMIT ?",
            job,
            after,
            -1 if limit is None else limit,
        )
        return [StoredFact(int(row[0]), _fact(row[1], row[2])) for row in reversed(rows)]

    def page_of_facts(self, job: str, after: int, limit: int, *, newest: bool) -> list[StoredFact]:
        """Facts of a job after sequence number `after`, in order: the oldest `limit` of them, or the newest;
        fewer if these are large, but at least one if there is one."""
        order = "DESC" if newest else "ASC"
        past = "FROM facts WHERE job = ? AND sequence > ?"
        query = f"SELECT sequence, at, fact {past} ORDER BY sequence {order}"
        found: list[StoredFact] = []
        num_bytes = 0
        with self._reading, contextlib.closing(self._reader.execute(query, (job, after))) as rows:
            for sequence, at, text in rows:
                num_bytes += len(text)
                if len(found) == limit or (found and num_bytes > _PAGE_BYTES):
                    break
                found.append(StoredFact(int(sequence), _fact(at, text)))
        return found[::-1] if newest else found

    def jobs(self) -> list[str]:
        """Every job ever submitted, oldest first."""
        rows = self._read("SELECT job FROM facts WHERE sequence = 1 ORDER BY at, job")
        return [str(job) for (job,) in rows]

    def pending_commands(self) -> list[PendingCommand]:
        """Commands not marked done, in the order in which they were stored."""
        rows = self._read("SELECT job, command FROM commands WHERE done = 0 ORDER BY ordinal")
        return [PendingCommand(str(job), read_back(_COMMANDS, 0.0, text)) for job, text in rows]

    def mark_done(self, key: str) -> None:
        with self._transaction() as db:
            db.execute("UPDATE commands SET done = 1 WHERE key = ?", (key,))

    def record_metrics(self, job: str, metrics: Sequence[StepMetrics]) -> None:
        """Keep one row per step; a repeated step replaces its row, unless an older generation reports it."""
        replaced = ", ".join(f"{name} = excluded.{name}" for name in _METRICS[1:])
        with self._transaction() as db:
            db.executemany(
                f"INSERT INTO metrics (job, {', '.join(_METRICS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT (job, step) DO UPDATE SET {replaced}"
                " WHERE excluded.generation >= metrics.generation",
                [(job, *(getattr(step, name) for name in _METRICS)) for step in metrics],
            )

    def metrics(self, job: str, after: int = 0, limit: int | None = None) -> list[StepMetrics]:
        """The newest `limit` rows past step `after`, in order of step."""
        rows = self._read(
            f"SELECT {', '.join(_METRICS)} FROM metrics WHERE job = ? AND step > ?"
            " ORDER BY step DESC LIMIT ?",
            job,
            after,
            -1 if limit is None else limit,
        )
        return [_metrics(row) for row in reversed(rows)]

    def page_of_metrics(self, job: str, after: int, limit: int) -> list[StepMetrics]:
        """The oldest `limit` rows past step `after`, in order of step."""
        rows = self._read(
            f"SELECT {', '.join(_METRICS)} FROM metrics WHERE job = ? AND step > ? ORDER BY step LIMIT ?",
            job,
            after,
            limit,
        )
        return [_metrics(row) for row in rows]

    def thinned_metrics(self, job: str, after: int, points: int) -> ThinnedMetrics:
        """The rows past step `after`: all of them if they are `points` at most, else the one with the least
        and the one with the greatest loss of each of `points` / 2 stretches of steps, and the last one.

        SQLite does it without Python's lock, and no other row enters this process's memory.
        """
        past = "FROM metrics WHERE job = ? AND step > ?"
        [(num_rows, newest, skipped)] = self._read(
            f"SELECT count(*), coalesce(max(step), 0), coalesce(sum(skipped), 0) {past}", job, after
        )
        if num_rows <= points:
            return ThinnedMetrics(self.page_of_metrics(job, after, points), num_rows, skipped)
        width = -(-(newest - after) // max(1, points // 2))
        found: dict[int, StepMetrics] = {}
        for choice in ("min", "max"):  # SQLite takes the other columns from the row with that value
            columns = ", ".join(f"{choice}(loss)" if name == "loss" else name for name in _METRICS)
            query = f"SELECT {columns} {past} GROUP BY (step - ? - 1) / ?"
            for row in self._read(query, job, after, after, width):
                found[int(row[0])] = _metrics(row)
        last = self.metrics(job, after, 1)
        found |= {row.step: row for row in last}
        return ThinnedMetrics([found[step] for step in sorted(found)], num_rows, skipped)

    def close(self) -> None:
        """Close the database, unless a thread hangs in it; then the end of the process closes it."""
        if self._reading.acquire(timeout=_CLOSE_S):
            self._reader.close()
            self._reading.release()
        if self._mutex.acquire(timeout=_CLOSE_S):
            self._db.close()
            self._lock_file.close()
            self._mutex.release()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            self._db.close()
            message = f"{self.path}: schema {version}, this version of Makara reads {SCHEMA_VERSION}"
            raise JournalError(message)
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._mutex:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()


def hold(journal: Path) -> IO[str]:
    """Lock the journal for this process, until the returned file is closed or the process ends in any way.
    Raises `JournalLocked`."""
    path = journal.with_name(f"{journal.name}.lock")
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "an unknown process"
        file.close()
        raise JournalLocked(f"{path}: held by another manager (pid {holder})") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _fact(at: float, text: str) -> Fact | Unreadable:
    """Also of an earlier version. What cannot be read is kept as it was written."""
    fact = read_back(_FACTS, at, translated(text))
    return fact.model_copy(update={"text": text}) if isinstance(fact, Unreadable) else fact


def _metrics(row: Sequence[Any]) -> StepMetrics:
    values = dict(zip(_METRICS, row, strict=True))
    for name in ("loss", "grad_norm"):
        if values[name] is None:  # SQLite stores NaN as NULL
            values[name] = math.nan
    return StepMetrics(**{**values, "skipped": bool(values["skipped"])})
