"""Accepts jobs and continues ended ones: their files are stored before the journal entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...checkpoint import CREDENTIALS, Export
from ..core import can_go_on
from ..core.events import ContinueRequested, Event, JobSubmitted
from ..spec.job_spec import JobSpec, Resources
from ..spec.start_source import StartSource
from ..threads import CallKind, Threads
from .effects import Effects
from .files import JobFiles
from .journal import SqliteJournal
from .quarantine import Quarantined
from .runtime import Job

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Admission:
    """Runs on the event loop. Each operation runs to its end, even if its caller is cancelled: requests are,
    when the server ends."""

    jobs: dict[str, Job]
    files: JobFiles
    journal: SqliteJournal
    effects: Effects
    threads: Threads
    handle: Callable[[str, Event], Awaitable[None]]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._continuing: set[str] = set()  # jobs whose secrets are stored before they go on

    async def has_accepted(self, job: str) -> bool:
        """Whether there is a job of this id; one that is just being stored is waited for."""
        async with self._one_at_a_time:
            return job in self.jobs

    async def submit(
        self,
        job: str,
        spec: JobSpec,
        bundle: bytes,
        secrets: Mapping[str, str],
        start: StartSource | None = None,
        owner: str | None = None,
    ) -> bool:
        """Accept a job; False, and nothing is done, if there is one of this id. Durable, with its files, on
        return; on an error nothing is stored."""

        async def stored() -> bool:
            if job in self.jobs:
                return False
            sha256 = await self.threads.run(CallKind.FILES, self.files.store, job, bundle, secrets)
            self.jobs[job] = Job(job, [], [])
            try:
                value, now = spec.model_dump(mode="json"), self.clock()
                submitted = JobSubmitted(
                    now=now, job=job, spec=value, bundle_sha256=sha256, start=start, owner=owner
                )
                await self.handle(job, submitted)
            except Exception:
                # In the writers' queue, so that an append in progress is seen.
                if not await self.threads.run(CallKind.JOURNAL, self.journal.facts, job):
                    del self.jobs[job]
                    await self.threads.run(CallKind.FILES, self.files.forget, job)
                raise
            return True

        return await self._whole(self._alone(stored))

    async def go_on(self, job: str, resources: Resources, secrets: Mapping[str, str]) -> bool:
        """Continue a job that was stopped or failed, with these caps; False if it is not such a job. Durable,
        with its secrets, on return."""
        runtime = self.jobs[job]

        async def continued() -> bool:
            if not can_go_on(runtime.state):
                return False
            self._continuing.add(job)
            try:
                await self.threads.run(CallKind.FILES, self.files.store_secrets, job, secrets)
                runtime.quarantine = None  # whether it can be decided about is tried again
                caps = resources.model_dump(include={"min_nodes", "max_nodes", "max_hourly_cost", "budget"})
                await self.handle(job, ContinueRequested(now=self.clock(), **caps))
            except Quarantined:
                # Nothing was stored. After any other error the next manager checks the journal.
                self._continuing.discard(job)
                self.forget_secrets(runtime)
                raise
            finally:
                self._continuing.discard(job)
            self.forget_secrets(runtime)  # in case it does not continue after all
            return runtime.state.ended is None

        return await self._whole(self._alone(continued))

    async def export(self, job: str, call: Callable[[], Export]) -> Export:
        """Run an export of the job's weights in a thread; only one at a time for each job."""
        return await self._whole(self.effects.export(job, call))

    def forget_secrets(self, job: Job) -> None:
        """Delete secrets once the job has ended; keys of its store are kept until its cleanup is done."""
        if job.state.ended is not None and job.job not in self._continuing:
            needed = CREDENTIALS if self.effects.needs_store(job.job) else ()
            self.files.forget_secrets(job.job, but=needed)

    async def close(self, timeout_s: float) -> None:
        """Wait for what runs; the next manager accepts or drops what cannot finish in time."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def _alone(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._one_at_a_time:
            return await work()

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which runs to its end even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)
