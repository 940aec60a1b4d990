"""How many connections a manager keeps of peers that it does not know, and of those that it knows."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from in_service import Desk, desk
from makara.manager.api.app import create_app
from makara.manager.authority import Authority, names_of
from makara.manager.connections import MOST_OF_A_VM, Connections, allow_files
from makara.manager.http_server import Server
from makara.manager.service.tokens import Scope
from websockets.asyncio.client import ClientConnection, connect

FILES = 4096
HALF_A_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
BODY_BEGINS = (
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntok"
)


class Peer:
    """A connection that says `words` and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def is_ended(self) -> None:
        """Return once the manager has ended it."""
        async with asyncio.timeout(60):
            with suppress(ConnectionResetError):
                while await self.reader.read(1000):
                    pass

    def is_open(self) -> bool:
        return not self.reader.at_eof() and self.reader.exception() is None


@dataclass
class Front:
    """A listening manager, and peers that connect to it."""

    here: Desk
    address: tuple[str, int]
    opened: AsyncExitStack

    async def peer(self, words: bytes = b"") -> Peer:
        reader, writer = await asyncio.open_connection(*self.address)
        self.opened.callback(writer.close)
        writer.write(words)
        return Peer(reader, writer)

    async def agent(self, vm: str) -> ClientConnection:
        token = self.here.service.tokens.issue(Scope.WORKER, job="j", vm=vm, ttl_s=600.0)
        url = f"ws://{self.address[0]}:{self.address[1]}/api/v1/agents/{vm}"
        shown = {"Authorization": f"Bearer {token}"}
        return await self.opened.enter_async_context(connect(url, additional_headers=shown, proxy=None))

    async def asked(self, trust: ssl.SSLContext | None = None) -> int:
        """The status of an answer to a user's request on a connection of its own."""
        url = f"{'http' if trust is None else 'https'}://{self.address[0]}:{self.address[1]}/api/v1/jobs"
        verify = True if trust is None else trust
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=verify) as client:
            return (await client.get(url, headers=user_of(self.here))).status_code


@asynccontextmanager
async def listening(
    here: Desk, connections: Connections, authority: Authority | None = None
) -> AsyncIterator[Front]:
    server = Server(
        create_app(here.service),
        connections,
        lifespan="off",
        ssl_context_factory=authority.offered if authority is not None else None,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with AsyncExitStack() as opened:
            yield Front(here, listener.getsockname()[:2], opened)
        server.should_exit = True
        await serving


def few(most_unknown: int = 5) -> Connections:
    return Connections(FILES, most_unknown=most_unknown, unknown_s=3600.0, undisturbed_s=0.0)


def request_of(here: Desk, name: str) -> bytes:
    shown = user_of(here, name)["Authorization"]
    return f"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {shown}\r\n\r\n".encode()


def user_of(here: Desk, name: str = "ada") -> dict[str, str]:
    token = here.service.tokens.issue(Scope.USER, name=name)
    return {"Authorization": f"Bearer {token}"}


SLOW = {"idle": b"", "headers": HALF_A_REQUEST, "body": BODY_BEGINS}


@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW.keys())
def test_unknown_connections_are_bounded_in_number_and_agents_do_not_notice(
    tmp_path: Path, words: bytes
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 1})
            await here.tick()
            [vm] = here.vms("j")
            async with listening(here, few(5)) as front:
                agent = await front.agent(vm)
                peers = [await front.peer(words) for _ in range(20)]
                for peer in peers[:15]:
                    await peer.is_ended()
                assert await front.asked() == 200
                await agent.send(here.report_of(vm).model_dump_json())
                await here.until(lambda: vm in here.service.jobs["j"].reports)

    asyncio.run(play())


def test_tls_handshakes_that_do_not_end_are_unknown_connections(tmp_path: Path) -> None:
    async def play() -> None:
        authority = Authority(tmp_path, names_of("127.0.0.1"))
        trust = ssl.create_default_context(cadata=authority.certificate)
        async with desk(tmp_path) as here, listening(here, few(5), authority) as front:
            peers = [await front.peer(b"\x16\x03\x01") for _ in range(20)]
            for peer in peers[:15]:
                await peer.is_ended()
            assert await front.asked(trust) == 200

    asyncio.run(play())


def test_agents_that_come_back_at_once_do_not_push_each_other_out(tmp_path: Path) -> None:
    """More than may be unknown at a time; each needs a handshake before it can show its token."""

    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 40})
            await here.tick()
            connections = Connections(FILES, most_unknown=3, unknown_s=3600.0, undisturbed_s=60.0)
            async with listening(here, connections) as front:
                await asyncio.gather(*(front.agent(vm) for vm in here.vms("j")))
                await here.until(lambda: len(here.service.jobs["j"].connections) == 40)

    asyncio.run(play())


@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW.keys())
def test_unknown_connections_are_bounded_in_time_also_if_they_go_on_sending(
    tmp_path: Path, words: bytes
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here, listening(here, Connections(FILES, unknown_s=0.3)) as front:
            peer = await front.peer(words)
            ended = asyncio.create_task(peer.is_ended())
            while not ended.done():
                if words:
                    peer.writer.write(b"x")
                await asyncio.sleep(0.02)
            await ended

    asyncio.run(play())


def test_a_connection_with_a_token_outlives_the_time_of_unknown_ones(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here, listening(here, Connections(FILES, unknown_s=0.5)) as front:
            known = await front.peer(request_of(here, "ada"))
            await known.reader.readuntil(b'"jobs"')
            unknown = await front.peer()
            await unknown.is_ended()
            assert known.is_open()

    asyncio.run(play())


def test_one_user_or_vm_holds_a_share_of_all_connections(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 1})
            await here.tick()
            [vm] = here.vms("j")
            async with listening(here, Connections(20 * 16)) as front:  # 20 for each user
                ada = await front.peer(request_of(here, "ada"))
                await ada.reader.readuntil(b'"jobs"')
                eves = [await front.peer(request_of(here, "eve")) for _ in range(25)]
                agents = [await front.agent(vm) for _ in range(MOST_OF_A_VM + 3)]
                for ended in eves[:5]:
                    await ended.is_ended()
                for agent in agents[:3]:
                    await agent.wait_closed()
                assert ada.is_open()
                assert all(peer.is_open() for peer in eves[5:])

    asyncio.run(play())


def test_the_last_files_are_for_the_manager_itself(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            with socket.socket() as newest:
                few_left = newest.fileno() + 64 + 12
            async with listening(here, Connections(few_left)) as front:
                refused = [await front.peer() for _ in range(20)]
                await refused[-1].is_ended()

    asyncio.run(play())


def test_the_soft_limit_of_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert allow_files() == min(hard, 1 << 20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
