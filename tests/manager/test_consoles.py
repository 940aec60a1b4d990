"""What VMs wrote that did not join: read in time, bounded, and shown as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lying_cloud import Habits
from lying_history import JOB, History, Resources, explained
from makara.manager.cli import show
from makara.manager.cli.progress import answers
from makara.manager.core.facts import PersonNeeded, Resumption
from makara.manager.core.state import JobState, Waiting
from makara.manager.providers.consoles import MOST_LINES, last_lines
from makara.manager.service.views.waiting import waiting_view
from virtual_time import run_virtually

ASKED = {"fact": "person_needed", "at": 0.0, "reason": "why", "offers": ["again"], "vms_until": 1.0}


async def _nothing_joins(provider: str, home: Path) -> PersonNeeded:
    kind, zone = {"aws": ("small", "a"), "azure": ("Standard_S", "1")}[provider]
    changes: dict[str, Any] = {"provider": provider, "instance_type": kind, "zones": [zone]}
    history = History(7, home, Resources(changes=changes), habits=Habits(never_joins=1.0), clock_steps=False)
    with explained(history):
        try:
            history.begin()
            await history.until(lambda: history.state.waiting is not None, 8000.0, "a question")
            return next(f for f in history.journal.written[JOB] if isinstance(f, PersonNeeded))
        finally:
            await history.close()


@pytest.mark.parametrize("provider", ["aws", "azure"])
def test_a_person_reads_what_the_last_vm_wrote_while_it_was_there(tmp_path: Path, provider: str) -> None:
    asked = run_virtually(_nothing_joins(provider, tmp_path))
    assert asked.reason == "3 VMs in a row were rented and did not join"
    assert asked.console == f"{provider}-2 is pending"


def test_only_the_end_of_a_console_is_kept() -> None:
    lines = last_lines("".join(f"{n} {'x' * 1000}\r\n\r\n" for n in range(1000))).splitlines()
    assert len(lines) == MOST_LINES
    assert lines[-1].startswith("999 xxx")
    assert max(map(len, lines)) <= 200


def test_a_console_cannot_command_a_terminal_or_turn_text_around() -> None:
    wrote = "a\x1b[31mb\x1b[0m\x1b]0;title\x07c\x1b]8;;never ended\nd\x9b2Je\u202ef\x00\ud800g\x1bch\x1b"
    text = last_lines(wrote)
    assert text == "abc\nd 2Je f  gh"
    assert all(character.isprintable() for character in text.replace("\n", ""))


def test_status_and_events_mark_what_a_vm_wrote() -> None:
    state = JobState(
        job="j", waiting=Waiting(0.0, "why", (Resumption.AGAIN,), 1.0, console="no route\nto host")
    )
    view = waiting_view(state, 0)
    assert view is not None
    job = {"job": "j", "num_live_vms": 0, "vms": [], "waiting": view.model_dump(mode="json")}
    marked = ["the end of what the last of them wrote:", "  | no route", "  | to host"]
    assert answers(job)[-3:] == marked
    assert "no route" not in show.describe({**ASKED, "console": "no route"})
