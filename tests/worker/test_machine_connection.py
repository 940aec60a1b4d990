"""Whose answer ends `makara join`, and whose does not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from http_answers import Answer, Request, answering
from makara.protocol.machines import Challenge, machine_id
from makara.protocol.messages import Refusal
from makara.worker.machine import machine as machine_module
from makara.worker.machine.identity import MachineIdentity, WrongFolder
from makara.worker.machine.leased import LeasedVm
from makara.worker.machine.machine import Machine, Refused


def run(folder: Path, managers: Sequence[str]) -> NoReturn:
    """A machine that was let in by manager "one", while these answer in turn, until the last refuses it."""
    identity = MachineIdentity(folder)
    identity.admitted_by("one")
    asked, answers = list[str](), iter(managers)

    def answer(request: Request) -> Answer:
        asked.append(request.path.rpartition("/")[2])
        if asked[-1] == "challenge":
            return Answer(200, Challenge(manager=next(answers), nonce="n").model_dump_json())
        if asked.count("challenge") < len(managers):
            return Answer(502)
        refusal = Refusal(refused=machine_id(identity.public_key), manager=managers[-1], reason="removed")
        return Answer(403, refusal.model_dump_json())

    try:
        with answering(answer) as url:
            vm = LeasedVm(folder, url=url)
            tls = ssl.create_default_context()
            asyncio.run(Machine(url, identity, vm, token=None, name="lab", tls=tls).run())
    finally:
        identity.close()
    raise AssertionError("it runs until it is refused")


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_FIRST_RETRY_S", 0.0)


def test_another_manager_that_answers_from_the_beginning_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(WrongFolder, match="belongs to another manager"):
        run(tmp_path, ["two", "one"])


def test_another_manager_that_answers_for_a_while_ends_nothing(tmp_path: Path) -> None:
    """Found: of a lab whose manager's port another one had for a moment, no machine was left."""
    with pytest.raises(Refused, match="removed"):
        run(tmp_path, ["one", "two", "two", "one"])
