"""What the page of a job of 300,000 steps costs its manager: bytes sent, processor time, memory.

Beside it: the same history read and sent whole, as the page asked for it before. Each row is a process of its
own over the same journal, so that its memory is its own.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
from makara.manager.api.app import create_app
from makara.manager.api.history import MetricsView
from makara.manager.config import ServerConfig
from makara.manager.core.facts import Submitted
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.runtime import Job
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.service.views.steps import step_view, surviving
from makara.protocol.messages import StepMetrics

from .manager import SPEC
from .report import Row

TITLE = "the page of a job of 300,000 steps"
STEPS, POINTS, PAGES = 300_000, 2000, 6
_JOB = "j"


def rows() -> list[Row]:
    """One row for each way in which pages get the steps."""
    asks = {
        "whole, as before": None,
        f"{POINTS} points, compressed": [f"points={POINTS}"],
        f"the same, {PAGES} pages at once": [f"points={POINTS}"] * PAGES,
        "a reconnection, 100 steps later": [f"points={POINTS}&since={STEPS - 100}"],
        "all steps, page by page": [f"since={since}" for since in range(0, STEPS, 10_000)],
    }
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _write(home)
        found: list[Row] = []
        for what, queries in asks.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                found.append({"what": what, **alone.submit(_measured, home, queries).result()})
        return found


def _write(home: Path) -> None:
    journal = SqliteJournal(home / "journal.sqlite3")
    journal.append(_JOB, [Submitted(at=1.0, job=_JOB, spec=SPEC, bundle_sha256="none")], [])
    steps = (
        StepMetrics(
            step=step, generation=1, loss=1.0 + 1.0 / step, grad_norm=1.0, seconds=0.123456, samples=512
        )
        for step in range(1, STEPS + 1)
    )
    journal.record_metrics(_JOB, list(steps))
    journal.close()


def _measured(home: Path, queries: list[str] | None) -> Row:
    journal = SqliteJournal(home / "journal.sqlite3")
    job = Job(_JOB, journal.facts(_JOB), [])
    before_mb, cpu_s, began = _peak_mb(), time.process_time(), time.monotonic()
    num_bytes = _whole(journal, job) if queries is None else asyncio.run(_asked(home, journal, job, queries))
    found: Row = {
        "MB sent": num_bytes / 1e6,
        "CPU s": time.process_time() - cpu_s,
        "s": time.monotonic() - began,
        "MiB more in memory": _peak_mb() - before_mb,
    }
    journal.close()
    return found


def _whole(journal: SqliteJournal, job: Job) -> int:
    rows = surviving(job.state, journal.metrics(_JOB))
    return len(MetricsView(metrics=[step_view(row) for row in rows]).model_dump_json().encode())


async def _asked(home: Path, journal: SqliteJournal, job: Job, queries: list[str]) -> int:
    """The bytes of the API's answers to these queries, asked at once."""
    tokens = TokenStore(home / "tokens.sqlite3")
    config = ServerConfig(home=home)
    shown = {"Authorization": f"Bearer {tokens.ensure_admin(config.admin_token_file)}"}
    service = Service(config, journal, tokens, {})
    service.jobs[_JOB] = job

    async def ask(query: str) -> int:
        async with client.stream("GET", f"/api/v1/jobs/{_JOB}/metrics?{query}", headers=shown) as answer:
            assert answer.status_code == 200, await answer.aread()
            return sum([len(piece) async for piece in answer.aiter_raw()])

    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", timeout=None, headers={"Accept-Encoding": "gzip"}
    ) as client:
        sizes = await asyncio.gather(*map(ask, queries))
    tokens.close()
    return sum(sizes)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
