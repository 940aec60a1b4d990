"""A user whose store hardly answers, or who sends much at a time, holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from in_service import Desk, FakeProvider, desk
from makara.manager.api.app import create_app
from makara.manager.service import store_access
from makara.manager.service.tokens import Scope
from managers import job_spec

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@contextmanager
def silent_store() -> Iterator[tuple[str, list[socket.socket]]]:
    """A store that answers with headers, and never with a body: (its address, connections to it)."""
    peers: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peers.append(peer)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", peers
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for peer in peers:
                peer.close()


@asynccontextmanager
async def asking(here: Desk) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(here.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
        yield client


def shown(here: Desk, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {here.service.tokens.issue(Scope.USER, name=name)}"}


def at_store(endpoint: str) -> dict[str, str]:
    checkpoint = {"uri": "s3://bucket/p", "endpoint": endpoint}
    spec = job_spec(Path("/"), resources={"provider": "static"}, checkpoint=checkpoint)
    return {"spec": json.dumps({**spec, "secrets": list(KEYS)}), "secrets": json.dumps(KEYS)}


def test_a_users_store_that_hardly_answers_holds_up_no_other_user(tmp_path: Path) -> None:
    async def play() -> None:
        with silent_store() as (endpoint, peers):
            others = {"static": FakeProvider()}
            async with desk(tmp_path, providers=others) as here, asking(here) as client:
                held = [
                    asyncio.create_task(
                        client.post("/api/v1/jobs/check", data=at_store(endpoint), headers=shown(here, "eve"))
                    )
                    for _ in range(6)
                ]
                await here.until(lambda: len(peers) >= 4)
                ada = shown(here, "ada")
                away = at_store("http://127.0.0.1:1")
                answer = await client.post("/api/v1/jobs/check", data=away, headers=ada)
                assert answer.status_code == 503, "her own store was asked, and is away"
                assert not any(task.done() for task in held)
                for task in held:
                    task.cancel()

    asyncio.run(play())


def test_a_look_at_a_store_that_hardly_answers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_access, "_SUBMISSION_S", 0.2)

    async def play() -> None:
        with silent_store() as (endpoint, _):
            others = {"static": FakeProvider()}
            async with desk(tmp_path, providers=others) as here, asking(here) as client:
                eve = shown(here, "eve")
                answer = await client.post("/api/v1/jobs/check", data=at_store(endpoint), headers=eve)
                assert answer.status_code == 503, answer.text

    asyncio.run(play())


def test_a_user_has_a_few_large_requests_in_progress(tmp_path: Path) -> None:
    async def play() -> None:
        with silent_store() as (endpoint, peers):
            others = {"static": FakeProvider()}
            async with desk(tmp_path, providers=others) as here, asking(here) as client:
                eve = shown(here, "eve")
                large = at_store(endpoint) | {"idempotency": "x" * 100_000}
                ask = lambda: client.post("/api/v1/jobs/check", data=large, headers=eve)  # noqa: E731
                held = [asyncio.create_task(ask()) for _ in range(8)]
                await here.until(lambda: len(peers) >= 4)
                assert (await ask()).status_code == 429
                for task in held:
                    task.cancel()

    asyncio.run(play())
