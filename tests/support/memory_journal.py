"""A journal in memory that outlives the managers of a simulation. What it gives back was text in between."""

from __future__ import annotations

from collections.abc import Sequence

from makara.manager.core.commands import Command
from makara.manager.core.facts import Fact
from makara.manager.service.journal import JournalConflict, PendingCommand, StoredFact
from makara.manager.service.journal_text import read_back, readable_text
from makara.protocol.messages import StepMetrics
from pydantic import TypeAdapter

_FACTS: TypeAdapter[Fact] = TypeAdapter(Fact)
_COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)


class MemoryJournal:
    """As `SqliteJournal`, for one process. `attempts`: the names of those that it has."""

    def __init__(self) -> None:
        self.written: dict[str, list[Fact]] = {}
        self._facts: dict[str, list[tuple[float, str]]] = {}
        self._commands: dict[str, tuple[str, str]] = {}
        self._done: set[str] = set()

    def append(
        self, job: str, facts: Sequence[Fact], commands: Sequence[Command], expected: int | None = None
    ) -> int:
        stored = self._facts.setdefault(job, [])
        if expected is not None and expected != len(stored):
            raise JournalConflict(f"job {job} is at fact {len(stored)}, expected {expected}")
        stored += [(fact.at, readable_text(_FACTS, fact)) for fact in facts]
        self.written.setdefault(job, []).extend(facts)
        for command in commands:
            self._commands.setdefault(command.key, (job, readable_text(_COMMANDS, command)))
        return len(stored)

    def facts(self, job: str, after: int = 0, limit: int | None = None) -> list[StoredFact]:
        numbered = list(enumerate(self._facts.get(job, []), 1))[after:]
        newest = numbered if limit is None else numbered[-limit:]
        return [StoredFact(number, read_back(_FACTS, at, text)) for number, (at, text) in newest]

    def jobs(self) -> list[str]:
        return [job for job, facts in self._facts.items() if facts]

    def pending_commands(self) -> list[PendingCommand]:
        pending = [stored for key, stored in self._commands.items() if key not in self._done]
        return [PendingCommand(job, read_back(_COMMANDS, 0.0, text)) for job, text in pending]

    def mark_done(self, key: str) -> None:
        self._done.add(key)

    def record_metrics(self, job: str, metrics: Sequence[StepMetrics]) -> None:
        assert not metrics, "nobody trains here"

    def metrics(self, job: str, after: int = 0, limit: int | None = None) -> list[StepMetrics]:
        return []

    def close(self) -> None:
        pass
