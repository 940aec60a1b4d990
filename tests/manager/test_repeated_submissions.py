"""A submission that is sent again while the first is still in progress: one job."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_service import Desk, desk
from makara.manager.api.submission import KeyUsed, Submission, accept
from makara.manager.cli.apply import submit
from makara.manager.cli.client import Client, Unreachable
from managers import BUNDLE, archive, job_spec

# ---- the manager -------------------------------------------------------------------------------------------


class Held:
    """A blocking call that begins, and goes on once it is let."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, *values: Any) -> Any:
        self.begun.set()
        self.may_go_on.wait()
        return self._call(*values)


def hold(here: Desk, monkeypatch: pytest.MonkeyPatch, what: str) -> Held:
    """Hold the next submission where it stores its files, or where it is journalled."""
    owner, name = {"files": (here.service.files, "store"), "journal": (here.service.journal, "append")}[what]
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, held)
    return held


async def unanswered(task: asyncio.Task[Any]) -> bool:
    """Whether it waits, after it was given some time to go wrong."""
    await asyncio.wait({task}, timeout=0.3)
    return not task.done()


@pytest.mark.parametrize("where", ["files", "journal"])
def test_a_repetition_of_a_submission_in_progress_waits_for_it_and_is_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            held = hold(here, monkeypatch, where)
            wanted = Submission(json.dumps(job_spec(tmp_path / "store")), BUNDLE, idempotency_key="k")
            first = asyncio.create_task(accept(here.service, wanted))
            await here.until(held.begun.is_set)
            second = asyncio.create_task(accept(here.service, wanted))
            waited = await unanswered(second)
            held.may_go_on.set()
            (job, new), again = await asyncio.gather(first, second)
            assert waited
            assert new
            assert again == (job, False)

    asyncio.run(play())


@pytest.mark.parametrize("where", ["files", "journal"])
def test_another_submission_with_the_key_of_one_in_progress_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            held = hold(here, monkeypatch, where)
            spec, other = json.dumps(job_spec(tmp_path / "store")), archive({"train.py": b"other\n"})
            first = asyncio.create_task(accept(here.service, Submission(spec, BUNDLE, idempotency_key="k")))
            await here.until(held.begun.is_set)
            second = asyncio.create_task(accept(here.service, Submission(spec, other, idempotency_key="k")))
            waited = await unanswered(second)
            held.may_go_on.set()
            assert waited
            assert (await first)[1]
            with pytest.raises(KeyUsed, match="another submission"):
                await second

    asyncio.run(play())


def test_what_passed_all_checks_while_the_first_was_stored_is_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            spec, other = json.dumps(job_spec(tmp_path / "store")), archive({"train.py": b"other\n"})
            both = [
                accept(here.service, Submission(spec, code, idempotency_key="k")) for code in (BUNDLE, other)
            ]
            answers = await asyncio.gather(*both, return_exceptions=True)
            assert len(here.service.jobs) == 1
            assert sorted(type(answer).__name__ for answer in answers) == ["KeyUsed", "tuple"]

    asyncio.run(play())


# ---- the command line --------------------------------------------------------------------------------------

URL = "http://127.0.0.1:9"


class Answers(httpx.BaseTransport):
    """Answers a request with each of `given` in turn; notes what key each had."""

    def __init__(self, *given: Exception | dict[str, Any]) -> None:
        self._given = list(given)
        self.keys: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("Idempotency-Key"))
        answer = self._given.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(201, json=answer)


def sent(answers: Answers, key: str | None = None) -> dict[str, Any]:
    with Client(URL, "token") as client:
        client._http.close()
        client._http = httpx.Client(base_url=URL, transport=answers)
        return submit(client, {"spec": "{}", "secrets": "{}"}, b"", key)


def test_every_submission_has_a_key_of_its_own() -> None:
    answers = Answers(*[{"job": "j", "new": True}] * 3)
    for key in (None, None, "mine"):
        sent(answers, key)
    one, two, mine = answers.keys
    assert one
    assert two
    assert one != two
    assert mine == "mine"


def test_without_an_answer_in_time_a_submission_is_sent_once_more_with_its_key() -> None:
    answers = Answers(httpx.ReadTimeout("slow"), {"job": "j", "new": False})
    assert sent(answers)["job"] == "j"
    first, second = answers.keys
    assert first
    assert first == second


def test_if_the_manager_never_answers_the_user_learns_that_the_job_may_be_there_and_the_key() -> None:
    answers = Answers(*[httpx.ReadTimeout("slow")] * 2)
    with pytest.raises(Unreachable, match="may have accepted the job") as told:
        sent(answers)
    assert str(answers.keys[0]) in str(told.value)
    assert "no manager answers" not in str(told.value)


def test_a_manager_that_is_not_there_is_asked_once() -> None:
    answers = Answers(httpx.ConnectError("refused"))
    with pytest.raises(Unreachable, match="no manager answers"):
        sent(answers)
    assert len(answers.keys) == 1
