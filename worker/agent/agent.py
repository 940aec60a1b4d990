"""The agent: the process on a VM that talks to the manager.

It joins with a one-time secret, keeps one connection, runs one trainer per device, and passes orders down
and reports up. It decides nothing about the job. Losing the manager disturbs no trainer: the agent
reconnects. Only after `orphan_timeout_s` without a manager, or if the manager itself refuses this VM, does it
have a checkpoint published and end the VM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

import httpx
from pydantic import ValidationError

from ...protocol.frames import makara_version
from ...protocol.instruction_sets import environment_of, processor_flags
from ...protocol.messages import (
    INCARNATIONS,
    PROTOCOL,
    BootConfig,
    Failure,
    Orders,
    Phase,
    Report,
    Stacks,
    StepMetrics,
    WorkerReport,
)
from ...protocol.vm_keeper import adopt_orphans, end_children
from .backoff import Backoff
from .bundles import BadBundle, SetupFailed, fetch_secrets, prepare_bundle
from .connection import ManagerConnection, until_first
from .devices import environment_of_device, find_devices
from .ending import end_vm
from .family import Orphans
from .logs import BoundedLogs
from .notices.watcher import watcher_of
from .reports import as_beat, deaths_backlog, encode, last_words, metrics_backlog
from .standstill import pause
from .starts import REPORTS, count_start, last_of
from .store_sign_in import StoreSignIn
from .trainer_process import TrainerProcess
from .trainer_user import CodeUser
from .trust import NotTrusted, check_address, trust

log = logging.getLogger("makara.agent")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0  # between attempts to fetch the job's code


class Agent:
    """One VM's agent. Everything runs on one event loop; trainers are processes."""

    def __init__(self, boot: BootConfig) -> None:
        self._boot = boot
        self._directory = Path(boot.directory)
        earlier = count_start(self._directory)
        self._notices = watcher_of(boot, self._changed, self._has_handed_over)
        self._devices = find_devices(boot)
        self._connection = ManagerConnection(boot, self)
        self._orders: Orders | None = None
        self._user = CodeUser(boot.trainer_user)
        self._store_sign_in = StoreSignIn(boot.store_identity)
        self._trainers = [
            TrainerProcess(
                f"{boot.vm}.{index}",
                self._directory,
                boot.address,
                changed=self._changed,
                metrics=self._add_metrics,
                died=lambda last: self._deaths.add(last_words(last)),
                user=self._user,
                device=environment_of_device(device.kind, index),
                num_earlier=earlier * INCARNATIONS,
            )
            for index, device in enumerate(self._devices)
        ]
        self._broken_setup: Failure | None = None
        self._ordered = asyncio.Event()
        self._metrics, self._deaths = metrics_backlog(), deaths_backlog()
        for trainer in self._trainers if earlier else ():
            self._deaths.add(last_of(trainer.worker, earlier))
        self._shown = 0  # the newest answered request for stacks
        self._stacks: list[Stacks] = []
        self._stacks_told: int | None = None  # the first report that carried them
        self._sequence = earlier * REPORTS
        self._told: Report | None = None  # the last report, if it was sent completely
        self._ended = asyncio.Event()
        self._holding: str | None = None  # why the trainers must hold, whatever the orders say
        self._leaving: str | None = None

    async def run(self) -> None:
        """Serve until the manager says shutdown, refuses this VM, or stays away for the orphan timeout."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._ended.set)
        try:
            # An error in one of them ends the agent: a VM that does nothing must not look healthy.
            await until_first(
                self._connection.run(),
                self._watch_trainers(),
                self._watch_manager(),
                self._notices.run(),
                BoundedLogs(self._directory).keep(lambda: (self._orders or _NO_ORDERS).log_bytes),
                self._serve_job(),
                self._ended.wait(),
            )
        finally:
            for trainer in self._trainers:
                trainer.kill()
            if self._is_released():
                await self._notices.acknowledge()
            await self._notices.close()
            await self._store_sign_in.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # from now on a signal ends this process
        if self._is_released() or self._leaving is not None:
            await end_vm(self._boot.ending)

    def _on_sigterm(self) -> None:
        left_s = self._boot.notices.sigterm_s
        if left_s is None or self._notices.terminates:
            self._ended.set()
            return
        self._notices.terminate(left_s)
        asyncio.get_running_loop().call_later(left_s, self._ended.set)

    # ---- orders --------------------------------------------------------------------------------------------

    def obey(self, orders: Orders) -> None:
        """Take the manager's newest orders."""
        if self._orders is None or orders.stacks < self._shown:
            self._shown = orders.stacks  # requested before this VM existed, or before a journal was restored
        self._orders = orders
        self._ordered.set()
        if orders.action == "shutdown":
            log.info("ordered to shut down")
            self._ended.set()
            return
        for trainer in self._trainers:
            trainer.give_up(orders.given_up.get(trainer.worker, -1))
        self._hold(None)

    def _hold(self, reason: str | None) -> None:
        """Pass the trainers their orders; with a reason, have them save a checkpoint and stop stepping."""
        self._holding = reason
        if self._orders is not None:
            held = {"hold": True} if reason is not None else {}
            for trainer in self._trainers:
                trainer.give(self._orders.model_copy(update=held))
        self._changed()

    async def _serve_job(self) -> None:
        """Fetch the job's code and keep its trainers running."""
        while self._orders is None or self._orders.job is None:
            self._ordered.clear()
            await self._ordered.wait()
        job, backoff = self._orders.job, Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            try:
                secrets = await fetch_secrets(self._boot, self._connection.token)
                held = environment_of(job.instruction_set, processor_flags())
                own = {**job.envs, **secrets}
                environment = {**held, **await self._store_sign_in.environment(job, own), **own}
                token = self._connection.token
                bundle = await prepare_bundle(self._boot, token, job, environment, self._user)
                break
            except SetupFailed as error:
                self._broken_setup = Failure(kind="user", message=str(error), traceback=error.output)
                self._changed()
                await self._ended.wait()  # the manager ends this VM once it has the report
                return
            except (BadBundle, httpx.HTTPError, OSError) as error:
                log.warning("cannot fetch the job's code: %r", error)
                await asyncio.sleep(backoff.next_s())
        await until_first(*(trainer.run(bundle, environment) for trainer in self._trainers))

    # ---- reports -------------------------------------------------------------------------------------------

    def report(self, limit_bytes: int, *, is_first: bool, may_beat: bool) -> tuple[str, bool]:
        """This VM's whole state as JSON of at most `limit_bytes`, and whether it will be acknowledged.

        A beat if that is allowed and sufficient. The first of a connection carries all that was not
        acknowledged.
        """
        self._sequence += 1
        if is_first:
            self._metrics.send_again()
            self._deaths.send_again()
        report = self._report(limit_bytes)
        if may_beat and (beat := as_beat(report, self._told)) is not None:
            return beat, False
        encoded = encode(report, limit_bytes)
        self._told = None if encoded.failed else report
        self._metrics.put_back(encoded.num_metrics)
        self._deaths.put_back(encoded.num_deaths)
        if encoded.has_stacks and self._stacks_told is None:
            self._stacks_told = self._sequence
        for trainer in self._trainers:
            if trainer.worker in encoded.failed:
                trainer.fail(encoded.failed[trainer.worker])
        return encoded.text, True

    def acknowledge(self, sequence: int) -> None:
        """Note that the manager has stored all reports up to `sequence`."""
        self._metrics.acknowledge(sequence)
        self._deaths.acknowledge(sequence)
        if self._stacks_told is not None and sequence >= self._stacks_told:
            self._stacks, self._stacks_told = [], None
        if self._metrics.waits or self._deaths.waits:
            self._changed()

    def _report(self, limit_bytes: int) -> Report:
        notice = self._notices.notice
        return Report(
            vm=self._boot.vm,
            sequence=self._sequence,
            orders_version=self._orders.version if self._orders else 0,
            address=self._boot.address,
            devices=self._devices,
            workers=[self._worker_report(trainer) for trainer in self._trainers],
            progress=[trainer.progress for trainer in self._trainers],
            stacks=self._stacks,
            deaths=self._deaths.take(self._sequence, limit_bytes // 4),
            metrics=self._metrics.take(self._sequence, limit_bytes // 2),
            notice_deadline_s=notice.left_s if notice is not None else None,
            notice=notice.action if notice is not None else "",
            notices_known=self._notices.known,
            at_risk=self._notices.at_risk,
            leaving=self._leaving,
            holding=self._holding,
            protocol=PROTOCOL,
            makara=makara_version(),
        )

    def _has_handed_over(self) -> bool:
        """Whether this VM holds nothing of the job that is not elsewhere."""
        return self._is_released() or all(t.report.phase is Phase.LEFT for t in self._trainers)

    def _is_released(self) -> bool:
        return self._orders is not None and self._orders.action == "shutdown"

    def _worker_report(self, trainer: TrainerProcess) -> WorkerReport:
        broken = self._broken_setup
        return trainer.report.model_copy(update={"phase": Phase.EXITED, "failure": broken} if broken else {})

    def _add_metrics(self, metrics: StepMetrics) -> None:
        self._metrics.add(metrics)
        self._changed()

    def _changed(self) -> None:
        self._connection.changed()
        self._notices.look()

    # ---- the watch -----------------------------------------------------------------------------------------

    async def _watch_trainers(self) -> None:
        orphans = Orphans()
        while True:
            lease_s = self._orders.lease_s if self._orders else 60.0
            stood_still_s = await pause()
            for trainer in self._trainers:
                trainer.extend_lease(stood_still_s)
                trainer.check_lease(lease_s)
                trainer.sample()
            orphans.reap()
            if self._orders is not None and self._orders.stacks > self._shown:
                await self._show_stacks(self._orders.stacks)

    async def _show_stacks(self, number: int) -> None:
        """Take the stacks of all trainers, for their logs and the manager."""
        self._shown = number
        found = await asyncio.gather(*(trainer.stacks(number) for trainer in self._trainers))
        self._stacks, self._stacks_told = [stacks for stacks in found if stacks is not None], None
        self._changed()

    async def _watch_manager(self) -> None:
        """Save and end if the manager refuses this VM or is not seen; save and wait if it cannot be
        understood. Return to normal when the manager is heard again."""
        while True:
            self._connection.excuse(await pause())
            ends, reason = self._why_alone()
            if reason is None:
                if self._holding is not None:
                    log.info("the manager is heard again")
                    self._hold(None)
            elif await self._saved(reason) and ends and self._why_alone()[0]:
                self._leaving = reason
                self._ended.set()
                return

    def _why_alone(self) -> tuple[bool, str | None]:
        """(whether this VM is to end, why it is to hold; None if it is not)."""
        timeout_s = (self._orders or _NO_ORDERS).orphan_timeout_s
        alone_s = time.monotonic() - self._connection.heard_at
        if self._connection.refusal is not None:
            return True, f"refused: {self._connection.refusal}"
        if alone_s > timeout_s:
            return True, f"orphaned: no word of the manager for {timeout_s:g} s"
        return False, self._connection.misfit or self._connection.unknown_order

    async def _saved(self, reason: str) -> bool:
        """Have a checkpoint published, if not done yet; False if the manager came back meanwhile."""
        if self._holding is not None:
            return True
        log.error("%s: saving a checkpoint", reason)
        self._hold(reason)
        stop = time.monotonic() + (self._orders or _NO_ORDERS).orphan_save_s
        while any(trainer.may_save for trainer in self._trainers) and time.monotonic() < stop:
            stood_still_s = await pause()
            self._connection.excuse(stood_still_s)
            stop += stood_still_s
            if self._holding is None:
                return False
        return True


# The orders until the manager's first ones.
_NO_ORDERS = Orders(version=0, action="idle")


def main() -> None:
    """`python -m makara.worker.agent BOOT_FILE`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs a line for each request
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m makara.worker.agent BOOT_FILE")
    try:
        boot = BootConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
        check_address(boot.manager_url)
        trust(boot)
    except (OSError, ValidationError, NotTrusted) as error:
        raise SystemExit(f"boot file {sys.argv[1]}: {error}") from error
    adopt_orphans()
    try:
        asyncio.run(Agent(boot).run())
    finally:
        end_children()  # of a trainer, which may have left its session and lost its parent
