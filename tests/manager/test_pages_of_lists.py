"""Lists that grow with a job's history come in pages; the metrics of a long job thinned and compressed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
from in_service import Desk, desk
from makara.manager.api.app import create_app
from makara.manager.cli.client import Client
from makara.manager.core.facts import StopOrdered
from makara.manager.service.journal import SqliteJournal
from makara.protocol.messages import StepMetrics
from page_scripts import value_of

NUM_STEPS = 30_000
PEAK, DIP = 12_345, 23_456


def row(step: int, **changes: Any) -> StepMetrics:
    loss = {PEAK: 99.0, DIP: -99.0}.get(step, 1.0 + 1.0 / step)
    numbers = {"loss": loss, "grad_norm": 1.0, "seconds": 0.1, "samples": 8, **changes}
    return StepMetrics(step=step, generation=1, **numbers)


def long_job(here: Desk) -> None:
    here.service.journal.record_metrics("j", [row(step) for step in range(1, NUM_STEPS + 1)])


async def answer(here: Desk, path: str, **headers: str) -> httpx.Response:
    token = here.service.tokens.ensure_admin(here.service.config.admin_token_file)
    transport = httpx.ASGITransport(create_app(here.service))
    shown = {"Authorization": f"Bearer {token}", **headers}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as client:
        got = await client.get(path, headers=shown)
    assert got.status_code == 200, got.text
    return got


async def pages(here: Desk, path: str, field: str, cursor: str) -> list[list[Any]]:
    found, at = list[list[Any]](), 0
    while at is not None:
        page = (await answer(here, f"{path}{cursor}={at}")).json()
        found.append(page[field])
        at = page["next"]
    return found


def test_a_long_history_of_steps_comes_in_pages(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            long_job(here)
            found = await pages(here, "/jobs/j/metrics?", "metrics", "since")
            assert [len(page) for page in found] == [10_000, 10_000, 10_000, 0]
            assert [step["step"] for page in found for step in page] == list(range(1, NUM_STEPS + 1))

    asyncio.run(play())


def test_events_and_vms_and_jobs_come_in_pages(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 7})
            await here.tick()
            first = here.service.journal.append("j", [StopOrdered(at=1.0)] * 2500, [])
            here.service.jobs["j"].sequence = first
            found = await pages(here, "/jobs/j/events?", "events", "since")
            assert max(map(len, found)) == 1000
            sequences = [entry["sequence"] for page in found for entry in page]
            assert len(sequences) >= first
            assert sequences == list(range(1, len(sequences) + 1))
            vms = await pages(here, "/jobs/j/vms?limit=3&", "vms", "offset")
            assert [len(page) for page in vms] == [3, 3, 1]
            for number in range(4):
                await here.submit(f"k{number}")
            jobs = await pages(here, "/jobs?limit=2&", "jobs", "offset")
            assert [[job["job"] for job in page] for page in jobs] == [["k3", "k2"], ["k1", "k0"], ["j"]]

    asyncio.run(play())


def test_a_page_of_large_facts_is_shorter(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite3")
    text = '{"at":1.0,"fact":"stop_ordered","x":"' + "x" * 1_000_000 + '"}'
    with journal._transaction() as db:
        for number in range(1, 21):
            db.execute("INSERT INTO facts VALUES ('j', ?, 1.0, ?)", (number, text))
    assert [f.sequence for f in journal.page_of_facts("j", 0, 1000, newest=False)] == [1, 2, 3, 4]
    assert [f.sequence for f in journal.page_of_facts("j", 0, 1000, newest=True)] == [17, 18, 19, 20]
    journal.close()


def test_thinned_metrics_keep_the_peaks_the_dips_and_the_newest_step(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            long_job(here)
            some = (await answer(here, "/jobs/j/metrics?points=2000")).json()
            steps = [step["step"] for step in some["metrics"]]
            assert len(steps) <= 2001
            assert steps == sorted(set(steps))
            assert {1, PEAK, DIP, NUM_STEPS} <= set(steps)
            assert (some["num_steps"], some["next"]) == (NUM_STEPS, None)
            later = (await answer(here, f"/jobs/j/metrics?points=2000&since={NUM_STEPS - 3}")).json()
            assert [step["step"] for step in later["metrics"]] == [NUM_STEPS - 2, NUM_STEPS - 1, NUM_STEPS]

    asyncio.run(play())


def test_thinned_metrics_count_skipped_steps_and_stand_losses_that_are_no_numbers(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite3")
    journal.record_metrics(
        "j", [row(n, loss=math.nan if n < 500 else 1.0, skipped=n < 500) for n in range(1, 1001)]
    )
    some = journal.thinned_metrics("j", 0, 100)
    assert (some.num_rows, some.num_skipped) == (1000, 499)
    assert len(some.rows) <= 101
    assert any(math.isnan(found.loss) for found in some.rows)
    journal.close()


def test_a_long_answer_is_compressed_for_those_who_ask_for_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            long_job(here)
            packed = await answer(here, "/jobs/j/metrics?points=2000", **{"Accept-Encoding": "gzip"})
            plain = await answer(here, "/jobs/j/metrics?points=2000", **{"Accept-Encoding": "identity"})
            assert packed.headers["Content-Encoding"] == "gzip"
            assert "Content-Encoding" not in plain.headers
            assert packed.json() == plain.json()

    asyncio.run(play())


def test_the_command_line_follows_pages() -> None:
    asked: list[str] = []
    answers = {"0": ([1, 2], 2), "2": ([3, 4], 4), "4": ([5], None)}

    def serve(request: httpx.Request) -> httpx.Response:
        since = request.url.params.get("since", "0")
        asked.append(since)
        found, following = answers[since]
        return httpx.Response(200, json={"events": found, "next": following})

    with Client("http://127.0.0.1:1", "token") as client:
        client._http = httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(serve))
        assert client.get_all("/jobs/j/events", "events") == {"events": [1, 2, 3, 4, 5]}
    assert asked == ["0", "2", "4"]


SCRIPTS = ("words.js", "draw.js", "decisions.js", "job.js", "app.js")


def test_the_page_asks_for_thinned_metrics_and_on_reconnection_for_later_ones_alone() -> None:
    code = """
        const asked = [];
        const rows = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => (
          { step: from + i, generation: 1, loss: 1, skipped: false }));
        const morphs = [];
        fetch = async (path) => {
          asked.push(path);
          const since = Number(/since=(\\d+)/.exec(path)?.[1]);
          const metrics = rows(since + 1, since ? 60 : 50);
          const value = { job: "j", steps: 90, morphs, metrics, num_skipped: 0, events: [] };
          return { ok: true, status: 200, json: async () => value };
        };
        job = { job: "j", steps: 90, morphs };
        drawSoon = () => {};
        const again = () => catchUp("/base", visit);
        again().then(again).then(() => {
          morphs.push({ step: 55, generation: 2 });
          return again();
        }).then(() => [asked.filter((path) => path.includes("/metrics")), steps.length]);
    """
    asked, number = value_of(code, *SCRIPTS)
    assert asked == [f"/base/metrics?since={since}&points=2000" for since in (0, 50, 55)]
    assert number == 60, "steps after the one at which the new generation began are new"


def test_the_page_keeps_a_bounded_number_of_steps_with_peaks_and_dips() -> None:
    code = f"""
        drawSoon = () => {{}};
        job = {{ job: "j", morphs: [] }};
        for (let step = 1; step <= 20000; step++) {{
          const loss = step === {PEAK} ? 99 : step === 5432 ? -99 : 1;
          addSteps([{{ step, generation: 1, loss, skipped: step % 100 === 0 }}]);
        }}
        [steps.length, steps.some((s) => s.loss === 99), steps.some((s) => s.loss === -99),
         steps[steps.length - 1].step, skipped]
    """
    number, peak, dip, last, skipped = value_of(code, *SCRIPTS)
    assert number <= 8000
    assert (peak, dip, last, skipped) == (True, True, 20000, 200)
