"""What was weighed for a decision is told alike by the API, the page and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makara.manager.api.decisions import weighed_in
from makara.manager.cli import main as cli
from makara.manager.core.alternatives import Alternative
from makara.manager.core.facts import GenerationPlanned, GrowthWeighed, PlanKept
from makara.manager.service.journal import StoredFact
from managers import Manager, release_all
from page_scripts import value_of
from test_rerouting import planned, rerouted_job


def rows_of_page(facts: list[StoredFact], code: str) -> Any:
    """What the page's functions make of these facts: the code's value; it finds them as `entries`."""
    entries = [
        {"sequence": s.sequence, "at": s.fact.at, "fact": s.fact.model_dump(mode="json")} for s in facts
    ]
    known = f"const entries = {json.dumps(entries)}; const job = 'j';"
    return value_of(f"{known}\n{code}", "words.js", "draw.js", "decisions.js")


@pytest.fixture(scope="module")
def history() -> list[StoredFact]:
    """Of a job that lost a worker of 2x2 and went on with another plan."""
    script, _ = rerouted_job()
    script.event(planned(script, ends_s=3600.0))
    return [StoredFact(number, fact) for number, fact in enumerate(script.facts, 1)]


def test_the_page_has_a_row_for_each_plan_that_was_weighed(history: list[StoredFact]) -> None:
    alternatives = history[-1].fact.model_dump()["alternatives"]
    code = """
        const list = decisionList(entries, job);
        list.all("details").map((node) => ({
          summary: node.all("summary")[0].textContent,
          heads: node.all("thead")[0].all("th").map((cell) => cell.textContent),
          rows: node.all("tbody")[0].all("tr").map((row) => row.all("td").map((cell) => cell.textContent)),
        }))
    """
    (shown,) = rows_of_page(history, code)
    assert "v3.0" in shown["summary"]
    assert shown["summary"].endswith(f": new 1×3, beside {len(alternatives) - 1} others")
    assert shown["heads"] == ["Plan", "Step", "Begins in", "Losses/h", "Next loss costs", "Worth", ""]
    first, second, *others = shown["rows"]
    assert (first[0], first[-1]) == ("new 1×3", "taken")
    assert (second[0], second[-1]) == ("rerouted 2×2-1", "worth less")
    assert second[2] == "0 ms"
    for row, one in zip((first, second), alternatives, strict=False):
        assert row[5] == f"{one['worth']:#.4g} samples/s"
        assert float(row[3]) == pytest.approx(3600 * one["changes_per_s"], rel=0.1)
        assert row[4].endswith(" s")
    assert [row[-1] for row in others] == [one["rejected"] for one in alternatives[2:]]
    assert {row[5] for row in others} == {"–"}


def test_a_decision_that_was_opened_stays_open_when_the_page_is_drawn_again(
    history: list[StoredFact],
) -> None:
    code = """
        const before = decisionList(entries, job).all("details")[0];
        const closed = before.open;
        before.open = true;
        before.listeners.toggle();
        const again = decisionList(entries, job).all("details")[0];
        const open = again.open;
        again.open = false;
        again.listeners.toggle();
        [closed, open, decisionList(entries, job).all("details")[0].open]
    """
    assert rows_of_page(history, code) == [False, True, False]


def test_the_page_says_so_where_nothing_was_weighed(history: list[StoredFact]) -> None:
    assert rows_of_page(history[:1], "decisionList(entries, job).textContent") == "None yet."


def test_the_api_tells_each_decision_with_its_alternatives(history: list[StoredFact]) -> None:
    (found,) = weighed_in(history)
    fact = history[-1].fact
    assert isinstance(fact, GenerationPlanned)
    assert (found.sequence, found.generation, found.cause) == (len(history), 2, fact.cause)
    assert found.alternatives == fact.alternatives


def test_what_changes_nothing_is_told_as_well() -> None:
    none_more, running = (
        tuple(
            Alternative(
                name=name, shape="2×2", step_s=1.0, begins_s=0.0, changes_per_s=0.0, change_s=0.0, worth=worth
            )
            for name, worth in named
        )
        for named in ((("as many", 10.0), ("2 more", 9.0)), (("running", 10.0), ("best", 10.2)))
    )
    kept = PlanKept(at=2.0, generation=3, cause="paces changed", until=None, alternatives=running)
    facts = [
        StoredFact(1, GrowthWeighed(at=1.0, num_more=0, alternatives=none_more)),
        StoredFact(2, kept),
        StoredFact(3, kept.model_copy(update={"alternatives": ()})),
    ]
    told = [(one.sequence, one.decided, one.generation, one.cause) for one in weighed_in(facts)]
    assert told == [(1, "growth", None, "more VMs"), (2, "kept", 3, "paces changed")]
    code = """
        decisionList(entries, job).all("details").map((node) => [
          node.all("summary")[0].textContent.split("  ")[1],
          node.all("tbody")[0].all("tr").map((row) => row.all("td").slice(-1)[0].textContent),
        ])
    """
    assert rows_of_page(facts, code) == [
        ["paces changed: as it runs 2×2, beside 1 other", ["taken", "not worth enough more"]],
        ["more VMs: as many VMs 2×2, beside 1 other", ["taken", "worth less"]],
    ]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("decisions") / "home").start()
    yield running
    running.stop()
    release_all(running.home)


def test_a_running_job_tells_what_was_weighed_by_api_and_command(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"training": {"steps": 10**6}, "resources": {"min_nodes": 2}}  # nobody else will join
    job = manager.submit(tmp_path / "store", **changes).json()["job"]
    manager.wait(job, lambda view: view["step"] > 0)
    decisions = manager.client.get(f"/jobs/{job}/decisions")["decisions"]
    assert decisions
    taken = decisions[-1]["alternatives"][0]
    assert taken["worth"] > 0
    assert taken["change_s"] > 0
    assert taken["rejected"] is None
    assert cli.main(["events", job, "--why", "--home", str(manager.home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if f" {taken['name']} {taken['shape']}: a step " in line]
    assert any(line.endswith(f"worth {taken['worth']:.4g} samples/s") for line in told)
    later = manager.client.get(f"/jobs/{job}/decisions", since=decisions[-1]["sequence"])["decisions"]
    assert later == []
    manager.client.post(f"/jobs/{job}/stop")
