"""The agents' side of the API: one WebSocket for each VM, the job's code, and its secrets.

A VM shows its join token until it has shown the worker token that it gets in return. Frames are JSON:
`Report` and `Beat` from the agent, `ToAgent` to it. A VM that is no longer wanted is admitted, so that it can
be told. One whose token is not valid is refused with a `Refusal`: only that tells a VM that this manager does
not know it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from fastapi import APIRouter, HTTPException, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse

from ...protocol.frames import Malformed, Misfit, makara_version, read_report_or_beat
from ...protocol.messages import (
    PROTOCOL,
    Beat,
    Credential,
    Message,
    Orders,
    Report,
    ReportAck,
    Welcome,
)
from ..service.believed_steps import STEPS_PER_S
from ..service.service import Service
from ..service.tokens import Scope, TokenRefused
from ..threads import CallKind
from .auth import admit, bearer, refuse, service_of, vm_of_job
from .description import answers

log = logging.getLogger("makara.manager")
router = APIRouter(prefix="/api/v1", tags=["agents"])

_REPLACED, _MALFORMED = 4000, 4002
_CLOSED = (WebSocketDisconnect, RuntimeError)  # what is raised when a connection has closed
_FRAME_S = 0.002  # at least; an agent reports once a step
_BYTES_PER_S = 8 << 20
_DEATH_S = 0.2  # each may be a fact of 64 KiB
_WORDS = 20  # acknowledgements in the time after which an agent without any ends its VM


@router.websocket("/agents/{vm}")
async def agent(websocket: WebSocket, vm: str) -> None:
    """One VM's connection. Without a token that is bound to this VM: 403 and a `Refusal`."""
    service = service_of(websocket)
    try:
        grant = await service.threads.run(
            CallKind.TOKENS, service.tokens.check, bearer(websocket) or "", Scope.JOIN, Scope.WORKER
        )
    except TokenRefused as refusal:
        await _refuse(websocket, vm, str(refusal))
        return
    if grant.vm != vm:
        await _refuse(websocket, vm, "this token is another VM's")
    elif grant.job not in service.jobs:
        await _refuse(websocket, vm, f"there is no job {grant.job}")
    else:
        admit(websocket, grant)
        await websocket.accept()
        await AgentConnection(service, websocket, grant.job, vm).serve()


async def _refuse(websocket: WebSocket, vm: str, reason: str) -> None:
    log.warning("VM %.100r is refused: %s", vm, reason)
    await refuse(websocket, vm, reason)


class AgentConnection:
    """One agent's connection: reads reports, sends the newest orders, renews the token."""

    def __init__(self, service: Service, websocket: WebSocket, job: str, vm: str) -> None:
        self._service = service
        self._websocket = websocket
        self._job = job
        self._vm = vm
        self._orders: Orders | None = None
        self._acknowledged: int | None = None
        self._report: Report | None = None  # the newest, updated by the beats after it
        self._said_at = time.monotonic()
        self._renewal_due = True
        self._wake = asyncio.Event()
        self._close_code: int | None = None

    async def serve(self) -> None:
        """Until either side closes the connection or a newer one takes its place."""
        service = self._service
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._send(_welcome(service, self._job))
            service.agents.connect(self._job, self._vm, self)
            tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._renew())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # An error raised here would hold this frame, and the frame the tasks that hold the error: such a
            # cycle keeps all of a closed connection until the collector runs, which is rare.
            for error in [task.exception() for task in done]:
                self._tell_end(error)
        except _CLOSED as error:
            self._tell_end(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.agents.disconnect(self._job, self._vm, self)

    def _tell_end(self, error: BaseException | None) -> None:
        """Raise errors other than those of a closed connection."""
        if isinstance(error, _CLOSED):
            log.info("VM %s: connection closed: %r", self._vm, error)
        elif error is not None:
            raise error

    def push(self, orders: Orders) -> None:
        self._orders = orders
        self._wake.set()

    def replaced(self) -> None:
        self._close_code = _REPLACED
        self._wake.set()

    async def _read(self) -> None:
        while True:
            text = await self._websocket.receive_text()
            try:
                frame = read_report_or_beat(text)
            except Misfit as misfit:
                self._service.agents.not_understood(self._job, self._vm, f"{misfit}; it saves and holds")
                continue  # it is not ended for that: it waits for a manager of its own kind
            except Malformed as error:
                self._service.agents.not_understood(
                    self._job, self._vm, f"its report cannot be read: {error}"
                )
                await self._websocket.close(_MALFORMED, "malformed report")
                return
            if isinstance(frame, Beat):
                self._take_beat(frame)
                await asyncio.sleep(_FRAME_S)
                continue
            if frame.vm != self._vm:
                log.error("VM %s reports as %s", self._vm, frame.vm)
                await self._websocket.close(_MALFORMED, "report of another VM")
                return
            self._report = frame
            await self._service.agents.report(self._job, frame)
            self._acknowledge(frame.sequence)
            await asyncio.sleep(_pause_s(text, frame))

    def _take_beat(self, beat: Beat) -> None:
        """Take in a beat. Nothing of it is stored, so it is acknowledged only now and then."""
        if self._report is None:
            return  # what it refers to was of another protocol
        carried = {"metrics": [], "deaths": [], "sequence": beat.sequence, "progress": beat.progress}
        self._report = self._report.model_copy(update=carried)
        self._service.agents.beat(self._job, self._report)
        if time.monotonic() - self._said_at > self._service.leases.orphan_timeout_s / _WORDS:
            self._acknowledge(beat.sequence)

    def _acknowledge(self, sequence: int) -> None:
        self._acknowledged, self._said_at = sequence, time.monotonic()
        self._wake.set()

    async def _write(self) -> None:
        """Send the newest orders and acknowledgement; older ones are dropped, so nothing queues up."""
        while self._close_code is None:
            await self._wake.wait()
            self._wake.clear()
            if self._renewal_due:
                self._renewal_due = False
                await self._send(await self._credential())
            if self._orders is not None:
                orders, self._orders = self._orders, None
                await self._send(orders)
            if self._acknowledged is not None:
                sequence, self._acknowledged = self._acknowledged, None
                await self._send(ReportAck(sequence=sequence))
        await self._websocket.close(self._close_code)

    async def _renew(self) -> None:
        while True:
            self._renewal_due = True
            self._wake.set()
            await asyncio.sleep(self._service.leases.worker_token_s / 3)

    async def _credential(self) -> Credential:
        ttl_s = self._service.leases.worker_token_s
        issue = partial(self._service.tokens.issue, Scope.WORKER, job=self._job, vm=self._vm, ttl_s=ttl_s)
        token = await self._service.threads.run(CallKind.TOKENS, issue)
        return Credential(token=token, valid_for_s=ttl_s)

    async def _send(self, message: Message) -> None:
        await self._websocket.send_text(message.model_dump_json())


def _pause_s(text: str, report: Report) -> float:
    """How long no frame is read after this one, so that an agent cannot take more than its share of this
    process and of the journal. The kernel holds back what it sends meanwhile."""
    rows_s = len(report.metrics) / STEPS_PER_S + len(report.deaths) * _DEATH_S
    return max(_FRAME_S, len(text) / _BYTES_PER_S, rows_s)


def _welcome(service: Service, job: str) -> Welcome:
    return Welcome(
        heartbeat_s=service.heartbeat_s(job),
        server_time=service.clock(),
        protocol=PROTOCOL,
        makara=makara_version(),
        manager=service.tokens.identity,
        max_report_bytes=service.config.max_report_bytes,
        beats=True,
    )


@router.get("/jobs/{job}/bundle", response_class=Response, responses=answers("application/gzip"))
async def bundle(job: str, request: Request) -> Response:
    """The job's code, for its own VMs: a tar.gz whose SHA-256 is in the orders."""
    service = service_of(request)
    await vm_of_job(request, job, Scope.WORKER)
    # Streamed: many VMs that boot together each fetch it, and it may be large.
    return FileResponse(service.files.bundle(job), media_type="application/gzip")


@router.get("/jobs/{job}/secrets")
async def secrets(job: str, request: Request) -> dict[str, str]:
    """The values of the job's secrets, for its own live VMs."""
    service = service_of(request)
    grant = await vm_of_job(request, job, Scope.WORKER)
    vm = service.jobs[job].state.vms.get(grant.vm or "")
    if vm is None or not vm.live:
        raise HTTPException(403, "this VM is no longer part of the job")
    return await service.threads.run(CallKind.FILES, service.files.secrets, job)
