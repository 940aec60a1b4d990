"""A job whose budget is spent, and that goes on with more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_manager import CloudManager, cloud_manager
from core_script import Script
from makara.manager.cli import main as cli
from makara.manager.cli.costs.shown import usd
from makara.manager.core.events import ContinueRequested, StopRequested
from makara.manager.core.facts import JobContinued

CLOUD = {"provider": "aws", "instance_type": "small", "budget": 10, "max_hourly_cost": 2}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CloudManager]:
    with cloud_manager(tmp_path / "home") as running:
        yield running


@pytest.fixture
def spent(manager: CloudManager, tmp_path: Path) -> str:
    """A job that stopped, for its VM was there for as long as the budget pays."""
    job = manager.submit(tmp_path, max_nodes=1, budget=0.5)
    manager.until(job, lambda view: view["num_live_vms"])
    manager.clock.now += 2400
    view = manager.until(job, lambda view: view["status"] == "stopped")
    assert "its budget of 0.5 USD" in view["reason"]
    return job


@pytest.mark.parametrize("more", [[], ["--budget", "0.6"]])
def test_a_spent_budget_is_refused_without_enough_more(
    manager: CloudManager, spent: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["resume", spent, *more, *manager.options]) == cli.MISTAKE
    budget = more[1] if more else "0.5"
    gone = manager.client.get(f"/jobs/{spent}")["cost"]["at_most"]
    assert gone >= 0.526 * 2400 / 3600
    assert f"resources.budget: {budget} less {gone:.4g} that are spent, but " in capsys.readouterr().err
    assert manager.client.get(f"/jobs/{spent}")["status"] == "stopped"


def test_a_job_whose_budget_is_spent_goes_on_with_more(
    manager: CloudManager, spent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", spent, *manager.options]) == 0
    before = manager.client.get(f"/jobs/{spent}")["cost"]
    left = f"of its budget of $0.50 {usd(before['budget_left'])} is left, --budget says another"
    assert left in capsys.readouterr().out
    more = ["--budget", "5", "--max-hourly-cost", "0.6"]
    for _ in range(2):  # whoever lost the answer asks again
        assert cli.main(["resume", spent, *more, *manager.options]) == 0
    view = manager.until(spent, lambda view: view["num_live_vms"])
    assert (view["cost"]["budget"], view["cost"]["max_hourly_cost"]) == (5.0, 0.6)
    assert view["cost"]["at_most"] >= before["at_most"] + 0.526 / 60, "it has cost that before"
    (continued,) = (
        entry["fact"]
        for entry in manager.client.get(f"/jobs/{spent}/events")["events"]
        if entry["fact"]["fact"] == "job_continued"
    )
    assert (continued["budget"], continued["max_hourly_cost"]) == (5.0, 0.6)


def test_a_budget_has_no_meaning_for_a_job_that_rents_nothing(
    manager: CloudManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = manager.submit(tmp_path, provider="local", instance_type=None)
    manager.client.post(f"/jobs/{job}/stop")
    manager.until(job, lambda view: view["status"] == "stopped")
    assert cli.main(["resume", job, "--budget", "5", *manager.options]) == cli.MISTAKE
    assert "resources.budget: has no meaning with provider local" in capsys.readouterr().err


def test_going_on_keeps_the_caps_that_nobody_changes() -> None:
    script = Script()
    script.submit(resources=CLOUD)
    script.event(StopRequested(now=script.now))
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=3, budget=20.0))
    assert script.last(JobContinued).max_hourly_cost is None
    assert script.state.spec is not None
    resources = script.state.spec.resources
    assert (resources.max_nodes, resources.budget, resources.max_hourly_cost) == (3, 20.0, 2.0)
