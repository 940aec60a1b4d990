"""The watcher: polls one source and keeps the current notice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ....protocol.messages import BootConfig
from .aws import AwsSource
from .azure import AzureSource
from .file import FileSource
from .notice import Notice, Reading, Source, Unanswered

log = logging.getLogger("makara.agent")

_SIGTERM = "SIGTERM"


class NoticeWatcher:
    """`run` polls; properties hold the current state. Runs on the agent's event loop only.

    `changed` is called when a notice comes or goes, or the VM's risk changes. A notice counts down while its
    source does not answer; once `handed_over()` is true, the cloud is told that it need not wait.
    """

    def __init__(
        self,
        source: Source,
        changed: Callable[[], None],
        handed_over: Callable[[], bool],
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._changed = changed
        self._handed_over = handed_over
        self._steady = steady
        self._reading: Reading | None = None
        self._read_at = 0.0
        self._signalled: float | None = None  # the deadline set by a SIGTERM
        self._acknowledged = ""  # the acknowledged notice
        self._trouble = False
        self._over = asyncio.Event()  # set once the VM has handed over

    @property
    def known(self) -> bool:
        """Whether the source has answered."""
        return self._reading is not None

    @property
    def terminates(self) -> bool:
        """Whether a SIGTERM has come."""
        return self._signalled is not None

    @property
    def at_risk(self) -> bool:
        return self._reading is not None and self._reading.at_risk

    @property
    def notice(self) -> Notice | None:
        """The current notice that is due first."""
        found = [notice for notice in (self._told(), self._of_signal()) if notice is not None]
        return min(found, key=lambda notice: notice.left_s, default=None)

    def terminate(self, left_s: float) -> None:
        """Note that the operating system ends this VM, or this agent, in `left_s` seconds."""
        if self._signalled is None:
            log.warning("SIGTERM: a notice of %g s", left_s)
            self._signalled = self._steady() + left_s
            self._changed()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self._read()
            if self._handed_over():
                await self.acknowledge()
            # Before Python 3.12 `asyncio.wait_for` loses a cancellation that coincides with the result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._source.period_s):
                    await self._over.wait()
            self._over.clear()

    def look(self) -> None:
        """Check for a hand-over after a worker changed, to tell the cloud before the VM is released."""
        notice = self._told()
        if notice is not None and notice.id != self._acknowledged and self._handed_over():
            self._over.set()

    async def close(self) -> None:
        await self._source.close()

    async def acknowledge(self) -> None:
        """Tell the cloud of each notice once that it need not wait. Bounded in time; failures are logged."""
        notice = self._told()
        if notice is None or notice.id == self._acknowledged:
            return
        try:
            await self._source.acknowledge(notice)
            self._acknowledged = notice.id
        except Unanswered as error:
            log.warning("notice %s could not be acknowledged: %s", notice.action, error)

    def _told(self) -> Notice | None:
        """The cloud's notice with the time left now."""
        notice = self._reading.notice if self._reading is not None else None
        if notice is None:
            return None
        return replace(notice, left_s=max(0.0, notice.left_s - (self._steady() - self._read_at)))

    def _of_signal(self) -> Notice | None:
        if self._signalled is None:
            return None
        return Notice(_SIGTERM, max(0.0, self._signalled - self._steady()))

    async def _read(self) -> None:
        try:
            reading = await self._source.read()
        except Unanswered as error:
            if not self._trouble:
                log.warning("the cloud cannot be asked for notices: %s", error)
            self._trouble = True
            return
        if self._trouble:
            log.info("the cloud can be asked for notices again")
        self._trouble = False
        before, self._reading, self._read_at = self._reading, reading, self._steady()
        if before is None or _mark(before) != _mark(reading):
            if before is not None or _mark(reading) != _mark(Reading()):
                log.warning("the cloud says: %s", _describe(reading))
            self._changed()


def watcher_of(
    boot: BootConfig, changed: Callable[[], None], handed_over: Callable[[], bool]
) -> NoticeWatcher:
    """The watcher that the boot file asks for."""
    match boot.notices.kind:
        case "file":
            source: Source = FileSource(Path(boot.directory))
        case "aws":
            source = AwsSource(boot.notices.metadata_url)
        case "azure":
            source = AzureSource(boot.notices.metadata_url)
        case "none":
            source = Source()
    return NoticeWatcher(source, changed, handed_over)


def _mark(reading: Reading) -> tuple[object, ...]:
    """The part of a reading whose changes are reported at once."""
    notice = reading.notice
    return (notice.action, notice.id) if notice is not None else None, reading.at_risk


def _describe(reading: Reading) -> str:
    if reading.notice is not None:
        return f"{reading.notice.action} in {reading.notice.left_s:.0f} s"
    return "at an elevated risk of being taken" if reading.at_risk else "no notice any more"
