"""`/api/v1/machines`: the pool of machines that users join, and the connection of each.

A machine authenticates before its connection is accepted: it signs a nonce of this manager, and an unknown
one shows a join token as well. Others are refused with a `Refusal`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import APIRouter, HTTPException, Request, Response, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ValidationError

from ...protocol.machines import (
    JOIN_HEADER,
    SCHEME,
    Challenge,
    MachineOrders,
    MachineReport,
    machine_id,
)
from ..http_server import connection_of
from ..providers.pool import MachinePool, MachineState
from ..providers.static import StaticProvider
from ..service.service import Service
from ..service.tokens import TokenRefused
from ..threads import CallKind
from .auth import Admin, User, refuse, service_of

log = logging.getLogger("makara.manager")
router = APIRouter(prefix="/api/v1/machines", tags=["machines"])

_MALFORMED, _NOT_THIS_ONE = 4002, 4003


class MachinesView(BaseModel):
    machines: list[MachineState]


@router.get("")
async def machines(request: Request, grant: User) -> MachinesView:
    """All machines that joined, in that order; a user sees only the names of VMs of jobs of their own."""
    service = service_of(request)
    found = await service.threads.run(CallKind.LIST_VMS, pool_of(service).machines, owner="static")
    if grant.owner is not None:
        own = {vm for job in service.shown_to(grant.owner) for vm in job.state.vms}
        found = [_without_names(machine, own) for machine in found]
    return MachinesView(machines=found)


def _without_names(machine: MachineState, own_vms: set[str]) -> MachineState:
    """The machine without what names other users' jobs: VMs, and files in their folders."""
    vm = machine.vm if machine.vm in own_vms else None
    unwiped = "files of a VM that ended cannot be removed" if machine.unwiped else ""
    return machine.model_copy(update={"vm": vm, "unwiped": unwiped})


@router.delete("/{machine}", status_code=204)
async def remove(machine: str, request: Request, _: Admin) -> None:
    """Remove a machine: its VM ends, and it needs a join token to come back. Admin token only."""
    service = service_of(request)
    if not await service.threads.run(CallKind.RELEASE_VM, pool_of(service).remove, machine, owner="static"):
        raise HTTPException(404, f"machine: there is no {machine!r}")


@router.get("/challenge")
async def challenge(request: Request) -> Challenge:
    """The nonce that a machine signs for its next connection; stateless."""
    service = service_of(request)
    return Challenge(manager=service.tokens.identity, nonce=pool_of(service).nonces.new())


@router.websocket("/connection")
async def connection(websocket: WebSocket) -> None:
    """A machine's connection: `MachineOrders` to it, `MachineReport` from it."""
    service = service_of(websocket)
    public_key = _proven(service, websocket.headers.get("Authorization", ""))
    if public_key is None:
        await websocket.send_denial_response(Response(status_code=401))
        return
    machine = machine_id(public_key)
    try:
        token = websocket.headers.get(JOIN_HEADER)
        await service.threads.run(CallKind.TOKENS, _admit, service, machine, public_key, token)
    except TokenRefused as refusal:
        log.warning("machine %s is refused: %s", machine, refusal)
        await refuse(websocket, machine, str(refusal))
        return
    accepted = connection_of(websocket.scope)
    if accepted is not None:
        accepted.admit(f"machine {machine}", of_vm=True)
    await websocket.accept()
    await MachineConnection(service, websocket, machine).serve()


def _admit(service: Service, machine: str, public_key: bytes, token: str | None) -> None:
    """Raise `TokenRefused` for a machine that is neither known nor has a valid token."""
    pool = pool_of(service)
    if pool.knows(machine):
        return
    if token is None:
        raise TokenRefused("this machine is not known here: it needs a join token")
    service.tokens.spend(token, machine)
    pool.admit(machine, public_key)
    log.info("machine %s joined", machine)


class MachineConnection:
    """One machine's connection: sends the newest orders, reads reports."""

    def __init__(self, service: Service, websocket: WebSocket, machine: str) -> None:
        self._threads = service.threads
        self._pool = pool_of(service)
        self._websocket = websocket
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._orders: MachineOrders | None = None
        self._removed = False
        self._wake = asyncio.Event()

    async def serve(self) -> None:
        self._pool.connect(self._machine, self._send)
        tasks = [asyncio.create_task(part) for part in (self._read(), self._write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (WebSocketDisconnect, RuntimeError) as error:
            log.info("machine %s: connection closed: %r", self._machine, error)
        finally:
            self._pool.disconnect(self._machine, self._send)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self, orders: MachineOrders | None) -> None:
        """Send orders; may be called from any thread. Only the newest are sent."""
        self._loop.call_soon_threadsafe(self._put, orders)

    def _put(self, orders: MachineOrders | None) -> None:
        if orders is None:
            self._removed = True
        elif self._orders is None or orders.version > self._orders.version:
            self._orders = orders
        self._wake.set()

    async def _read(self) -> None:
        while True:
            text = await self._websocket.receive_text()
            try:
                report = MachineReport.model_validate_json(text, extra="ignore")
            except ValidationError as error:
                log.error("machine %s: its report cannot be read: %s", self._machine, error)
                await self._websocket.close(_MALFORMED, "malformed report")
                return
            take = partial(self._pool.take, self._machine, report, self._send)
            if not await self._threads.run(CallKind.FILES, take, owner="machines"):
                await self._websocket.close(_NOT_THIS_ONE, "removed, or connected anew")
                return

    async def _write(self) -> None:
        while not self._removed:
            await self._wake.wait()
            self._wake.clear()
            if self._orders is not None:
                orders, self._orders = self._orders, None
                await self._websocket.send_text(orders.model_dump_json())
        await self._websocket.close(_NOT_THIS_ONE, "this machine was removed")


# ---- proofs ------------------------------------------------------------------------------------------------


def _proven(service: Service, authorization: str) -> bytes | None:
    """The public key that signed the nonce; None if the signature is not valid."""
    parts = authorization.split(" ")
    if len(parts) != 4 or parts[0] != SCHEME:
        return None
    try:
        public_key, signature = bytes.fromhex(parts[1]), bytes.fromhex(parts[3])
        text = Challenge(manager=service.tokens.identity, nonce=parts[2]).signed()
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, text)
    except (ValueError, InvalidSignature):
        return None
    return public_key if pool_of(service).nonces.use(parts[2]) else None


def pool_of(service: Service) -> MachinePool:
    provider = service.providers.get("static")
    if not isinstance(provider, StaticProvider):
        raise HTTPException(409, "providers: this manager takes no machines")
    return provider.pool
