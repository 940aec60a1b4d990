"""The agent's trainers: one process per device, watched by its beats, restarted when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import inherited
from ...protocol.frames import read_from_trainer
from ...protocol.log_tail import tail
from ...protocol.messages import Failure, Orders, Phase, Progress, Stacks, StepMetrics, WorkerReport
from ...protocol.vm_processes import kill_group
from ..memory_watch import MemoryWatch
from ..stacks import ALL_THREADS, MAIN_THREAD, is_cut, lead
from .backoff import Backoff
from .family import MARK, end_family
from .trainer_user import CodeUser

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0  # before a dead trainer is started again
_START_S = 120.0  # until the first beat: on a cold disk imports take longer than a lease
# glibc raises the threshold above which freed memory returns to the system to the largest tensor freed so
# far. Freed memory then stays, fragmented, and a worker needs up to twice what its tensors do. With glibc's
# initial threshold, 128 KiB, small tensors cost page faults: the example's step took 1.7 times as long.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_STACKS_S = 1.0  # time to write stacks
_STACKS_BYTES = 16_384  # the end of the stacks that is kept
_LAST_WORDS_S = 1.0  # time to read what a dead trainer wrote


class TrainerProcess:
    """One worker slot of the VM: the current trainer process, its report, and its incarnation number.

    `changed` is called whenever the report changes; `metrics` with each committed step that the trainer
    reports; `died` with the last report of each incarnation. Runs on the agent's event loop only.
    """

    def __init__(
        self,
        worker: str,
        directory: Path,
        address: str,
        changed: Callable[[], None],
        metrics: Callable[[StepMetrics], None],
        died: Callable[[WorkerReport], None],
        user: CodeUser,
        device: Mapping[str, str],
        num_earlier: int = 0,
    ) -> None:
        """`device`: the variables that show it its device alone, whatever the job's own say. `num_earlier`:
        the number of incarnations that earlier agents may have had."""
        self.worker = worker
        self.report = WorkerReport(worker=worker, incarnation=num_earlier, phase=Phase.STARTING)
        self.progress = Progress()
        self._log = directory / f"{worker}.log"
        self._address = address
        self._changed = changed
        self._metrics = metrics
        self._died = died
        self._user = user
        self._device = device
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._orders: Orders | None = None
        self._last_beat = 0.0
        self._beats = False  # whether it has sent a beat
        self._killed_for: Failure | None = None
        self._bundle = directory  # the job's code, once `run` is called
        self._mark = ""  # in the environment of this incarnation's processes
        self._memory: MemoryWatch | None = None

    async def run(self, bundle: Path, environment: Mapping[str, str]) -> None:
        """Keep a trainer running until cancelled; each death ends an incarnation and starts the next."""
        backoff, self._bundle = Backoff(_FIRST_DELAY_S, _LONGEST_DELAY_S), bundle.resolve()
        try:
            while True:
                await self._run_once(bundle, environment)
                if self._has_progressed():
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())
        finally:
            self.kill()
            if self._process is not None:
                await asyncio.wait([asyncio.create_task(self._process.wait())], timeout=_LAST_WORDS_S)
                end_family(self._process.pid, self._mark)  # now, because nothing does so later

    def _has_progressed(self) -> bool:
        """Whether the dead trainer had committed a step in its last generation."""
        formed = self.report.formed
        return formed is not None and self.report.step > formed.step

    def give(self, orders: Orders) -> None:
        """Pass the newest orders to the trainer."""
        self._orders = orders
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(orders.model_dump_json().encode() + b"\n")

    def check_lease(self, lease_s: float) -> None:
        """Kill the trainer if its beats stopped for `lease_s`; its peers wake from the closed sockets."""
        bound_s = lease_s if self._beats else max(lease_s, _START_S)
        if self._process is not None and time.monotonic() - self._last_beat > bound_s:
            self.fail(Failure(kind="lease", message=f"no beat for {bound_s:g} s"))

    def sample(self) -> None:
        """Sample the trainer's memory."""
        if self._process is not None and self._memory is not None:
            self._memory.sample()

    def give_up(self, incarnation: int) -> None:
        """Kill the trainer if it is this incarnation or an earlier one: the manager waits for the next."""
        if self._process is not None and self.report.incarnation <= incarnation:
            self.fail(Failure(kind="stuck", message="the manager gave it up: it made no progress"))

    async def stacks(self, number: int) -> Stacks | None:
        """The stacks of the trainer's threads, also written to its log; None if they are unavailable."""
        process = self._process
        if process is None or process.returncode is not None or not self._beats:
            return None  # before its first beat the signals would kill it
        try:
            begins = self._log.stat().st_size
            process.send_signal(ALL_THREADS)
            await asyncio.sleep(_STACKS_S)
            text = _end_of(self._log, begins)
            if is_cut(text) and process.returncode is None:
                process.send_signal(MAIN_THREAD)
                await asyncio.sleep(_STACKS_S)
                text = _end_of(self._log, begins)
        except OSError as error:
            text = f"they are not known: {error}"
        return Stacks(worker=self.worker, number=number, text=lead(text, self._bundle))

    def extend_lease(self, stood_still_s: float) -> None:
        """Do not count the time in which the agent itself was suspended, and read no beats.

        Silence observed before still counts, so that an agent that is often late detects it as well.
        """
        self._last_beat = min(time.monotonic(), self._last_beat + stood_still_s)

    @property
    def may_save(self) -> bool:
        """Whether it may still publish a checkpoint: it steps, or is in a phase unknown to this version."""
        return self.report.phase in (Phase.RUNNING, Phase.OTHER)

    def fail(self, failure: Failure) -> None:
        """Kill the trainer for a reason that it did not report itself."""
        self._killed_for = failure
        self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    async def _run_once(self, bundle: Path, environment: Mapping[str, str]) -> None:
        incarnation = self.report.incarnation + 1
        self.report = WorkerReport(worker=self.worker, incarnation=incarnation, phase=Phase.STARTING)
        self.progress = Progress()
        self._killed_for = None
        self._mark = f"{self.worker}/{incarnation}/{uuid.uuid4().hex}"
        try:
            self._process, connection = await self._start(bundle, environment)
        except OSError as error:  # no memory for a process, no space for its log: the VM's others go on
            self._report_death(Failure(kind="killed", message=f"it could not be started: {error}"))
            return
        self._memory = MemoryWatch(self._process.pid)
        self._changed()
        self._last_beat, self._beats = time.monotonic(), False
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=1 << 26)
        if self._orders is not None:
            self.give(self._orders)
        reading = asyncio.create_task(self._read(reader))
        try:
            # Wait for the process, not the socket, which a child of the user's code may hold open for ever.
            status = await self._process.wait()
            await asyncio.wait([reading], timeout=_LAST_WORDS_S)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            self._writer.close()
        pid = self._process.pid
        self._record_exit(status)
        # Its children may hold the device's memory, and connections by which peers would notice the death.
        await asyncio.to_thread(end_family, pid, self._mark)

    async def _start(
        self, bundle: Path, environment: Mapping[str, str]
    ) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start a trainer; returns it with the agent's end of its connection. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._log.open("ab") as log:
                process = await self._user.start(
                    *(self._user.python, "-P", "-m", "makara.worker.start", "makara.worker.trainer"),
                    *("--worker", self.worker, "--incarnation", str(self.report.incarnation)),
                    *("--fd", str(theirs.fileno()), "--bundle", str(bundle), "--address", self._address),
                    output=log,
                    pass_fds=[theirs.fileno()],
                    env={
                        **ALLOCATOR,
                        **inherited(self._user.environment(os.environ), environment),
                        **self._device,
                        MARK: self._mark,
                    },
                    cwd=bundle,
                )
        except BaseException:
            ours.close()
            raise
        return process, ours

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(_object(line))
        except ConnectionError:  # also from orders written after its death
            return  # the same as the end of the stream
        except ValueError as error:  # a line too long, or not a report: the job's own code wrote there
            self.fail(Failure(kind="internal", message=f"its report cannot be read: {error}"))

    def _take(self, value: dict[str, Any]) -> None:
        self._last_beat, self._beats = time.monotonic(), True
        if "report" in value:
            self.report = read_from_trainer(WorkerReport, value["report"])
            self._changed()
        elif "metrics" in value:
            self._metrics(read_from_trainer(StepMetrics, value["metrics"]))
        elif isinstance(beat := value.get("beat"), dict):
            self.progress = read_from_trainer(Progress, beat)

    def _record_exit(self, status: int) -> None:
        self._process = None
        failure = self.report.failure
        memory = self._memory.account() if self._memory is not None else ""
        if self._killed_for is not None:
            failure = self._killed_for.model_copy(update={"exit_code": status})
            if failure.kind == "lease":
                failure = failure.model_copy(update={"message": f"{failure.message}; {memory}"})
        elif failure is None and status < 0:
            message = f"ended by {_name_of(-status)}; {memory}"
            failure = Failure(kind="killed", message=message, exit_code=status)
        elif failure is None:
            message = f"exit status {status}; the end of its log:\n{tail(self._log, 2000)}"
            failure = Failure(kind="internal", message=message, exit_code=status)
        self._report_death(failure)

    def _report_death(self, failure: Failure) -> None:
        self.report = self.report.model_copy(update={"phase": Phase.EXITED, "failure": failure})
        self._died(self.report)
        self._changed()


def _object(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in a line. Raises `ValueError` if it is not one."""
    try:
        value: Any = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object")
    return value


def _name_of(number: int) -> str:
    """The name of a signal; real-time signals have none."""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def _end_of(log: Path, begins: int) -> str:
    """The end of what was written to a log since it had `begins` bytes, or since it was emptied."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begins if size >= begins else 0, size - _STACKS_BYTES))
        return file.read(_STACKS_BYTES).decode(errors="replace")
