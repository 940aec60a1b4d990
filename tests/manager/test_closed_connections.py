"""What a manager keeps of agents' connections that have closed: nothing that waits for the collector."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from in_service import Desk, desk
from makara.manager.api.agents import AgentConnection
from makara.manager.api.app import create_app
from makara.manager.authority import Authority, names_of
from makara.manager.connections import Connection, Connections
from makara.manager.http_server import AgentSocket, Server
from makara.manager.service.tokens import Scope
from websockets.asyncio.client import ClientConnection, connect
from websockets.server import ServerProtocol

VMS = 4
_OF_A_CONNECTION = (AgentConnection, AgentSocket, Connection, ServerProtocol)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nobody refers to is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def listening(here: Desk, home: Path) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """The service behind a socket as `serve` has it: (its address, what its agents trust)."""
    authority = Authority(home, names_of("127.0.0.1"))
    server = Server(
        create_app(here.service),
        Connections(1024),
        lifespan="off",
        ssl_context_factory=authority.offered,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        trust = ssl.create_default_context(cadata=authority.certificate)
        try:
            yield f"wss://127.0.0.1:{listener.getsockname()[1]}", trust
        finally:
            server.should_exit = True
            await serving


async def joined(here: Desk, address: str, trust: ssl.SSLContext) -> list[ClientConnection]:
    """Connections of all VMs of the job, each of which has reported."""
    made: list[ClientConnection] = []
    for vm in here.vms("j"):
        token = here.service.tokens.issue(Scope.WORKER, job="j", vm=vm, ttl_s=600.0)
        shown = {"Authorization": f"Bearer {token}"}
        agent = await connect(
            f"{address}/api/v1/agents/{vm}", ssl=trust, additional_headers=shown, proxy=None
        )
        await agent.send(here.report_of(vm).model_dump_json())
        made.append(agent)
    await here.until(lambda: all(vm in here.service.jobs["j"].reports for vm in here.vms("j")))
    return made


def kept() -> list[weakref.ref[Any]]:
    """Everything of connections that this process has."""
    return [weakref.ref(one) for one in gc.get_objects() if type(one) in _OF_A_CONNECTION]


async def close(agents: Sequence[ClientConnection]) -> None:
    for agent in agents:
        await agent.close()


async def reset(agents: Sequence[ClientConnection]) -> None:
    """As when their machines are gone."""
    for agent in agents:
        at_once = struct.pack("ii", 1, 0)
        agent.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        agent.transport.abort()


async def say_nonsense(agents: Sequence[ClientConnection]) -> None:
    for agent in agents:
        await agent.send("nonsense")
        await agent.wait_closed()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", [close, reset, say_nonsense])
def test_nothing_is_kept_of_connections_that_have_closed(tmp_path: Path, end: Any) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": VMS})
            await here.tick()
            async with listening(here, tmp_path) as (address, trust):
                agents = await joined(here, address, trust)
                seen = kept()
                assert len(seen) == VMS * len(_OF_A_CONNECTION)
                await end(agents)
                await here.until(lambda: not any(one() is not None for one in seen))

    asyncio.run(play())


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_of_connections_that_newer_ones_replace(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": VMS})
            await here.tick()
            async with listening(here, tmp_path) as (address, trust):
                first = await joined(here, address, trust)
                seen = kept()
                second = await joined(here, address, trust)
                await close(first)
                await here.until(lambda: not any(one() is not None for one in seen))
                assert len(kept()) == VMS * len(_OF_A_CONNECTION)
                await close(second)

    asyncio.run(play())
