"""Histories that the API is asked for: the newest of them, built beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_service import Desk, desk
from makara.manager.api import decisions, history
from makara.manager.api.app import create_app
from makara.manager.core.alternatives import Alternative
from makara.manager.core.facts import GrowthWeighed

NUM_DECISIONS = 6


async def got(here: Desk, path: str) -> Any:
    token = here.service.tokens.ensure_admin(here.service.config.admin_token_file)
    transport = httpx.ASGITransport(create_app(here.service))
    shown = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1/jobs/j") as client:
        answer = await client.get(path, headers=shown)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def with_history(here: Desk) -> int:
    """A job with decisions in its journal; the number of its facts."""
    await here.submit("j")
    weighed = (Alternative(name="as many", shape="1x1"),)
    facts = [GrowthWeighed(at=float(n), alternatives=weighed, num_more=n) for n in range(NUM_DECISIONS)]
    return here.service.journal.append("j", facts, [])


def sequences(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["sequence"] for entry in entries]


def test_of_a_long_history_the_newest_can_be_asked_for(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            last = await with_history(here)
            everything = (await got(here, "/events"))["events"]
            assert sequences(everything) == list(range(1, last + 1))
            assert (await got(here, "/events?limit=2"))["events"] == everything[-2:]
            assert (await got(here, f"/events?since={last - 1}&limit=2"))["events"] == everything[-1:]
            weighed = (await got(here, "/decisions"))["decisions"]
            assert len(weighed) == NUM_DECISIONS
            assert (await got(here, "/decisions?limit=2"))["decisions"] == weighed[-2:]
            since = f"/decisions?since={last - 1}&limit=2"
            assert (await got(here, since))["decisions"] == weighed[-1:]

    asyncio.run(play())


def test_histories_are_built_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*values: Any) -> Any:
            threads.append(threading.current_thread())
            return call(*values)

        return note

    monkeypatch.setattr(history, "to_json", noted(history.to_json))
    monkeypatch.setattr(decisions, "weighed_in", noted(decisions.weighed_in))

    async def play() -> None:
        async with desk(tmp_path) as here:
            last = await with_history(here)
            await got(here, "/events")
            await got(here, "/decisions")
            assert len(threads) == last + 1
            assert threading.current_thread() not in threads

    asyncio.run(play())
