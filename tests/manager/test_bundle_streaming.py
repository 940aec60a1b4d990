"""VMs fetch a job's code from the manager."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
from in_service import Desk, desk
from makara.manager.api.app import create_app
from makara.manager.service.tokens import Scope as TokenScope
from starlette.types import Message, Receive, Scope, Send

LARGE = 8 << 20


async def fetched(here: Desk, job: str) -> tuple[httpx.Response, list[int]]:
    """(the answer, the sizes of the pieces in which it was sent)."""
    app, sizes = create_app(here.service), list[int]()

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            sizes.append(len(message.get("body", b"")))
            await send(message)

        await app(scope, receive, note)

    token = here.service.tokens.issue(TokenScope.WORKER, job=job, vm=f"{job}-vm0", ttl_s=600.0)
    shown = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(noted), base_url="http://127.0.0.1/api/v1"
    ) as client:
        return await client.get(f"/jobs/{job}/bundle", headers=shown), sizes


def test_a_large_bundle_is_sent_in_pieces_and_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    async def play() -> None:
        code = random.Random(1).randbytes(LARGE)
        async with desk(tmp_path) as here:
            await here.submit("j")
            here.service.files.bundle("j").write_bytes(code)
            answer, sizes = await fetched(here, "j")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/gzip"
            assert answer.content == code
            assert max(sizes) <= LARGE // 8

    asyncio.run(play())
