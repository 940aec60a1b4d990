"""What `makara apply` says a job would cost, and that it asks before anything is rented."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from calibrations import uniform
from cloud_manager import RESOURCES, CloudManager, cloud_manager, offer
from core_script import spec as core_spec
from makara.manager.cli import apply as cli_apply
from makara.manager.cli import main as cli
from makara.manager.cli.costs.asking import lines
from makara.manager.cli.plan_text import PricedVms, request
from makara.manager.replay import Prices
from makara.manager.service.views.quote import Quote, quote_of
from makara.manager.spec.job_spec import Resources, parse_spec
from makara.manager.spec.placement import Market, Offer
from makara.morphing import choose
from managers import job_spec

SPOT, ON_DEMAND = Market.SPOT, Market.ON_DEMAND
OFFERS = [offer("a", SPOT, 0.2, 0.6), offer("b", SPOT, 0.3, 0.6), offer("a", ON_DEMAND, 0.6, 0.6)]
MODEL = {
    "seconds": 1.0, "not_compared": None, "notes": [], "largest_differences": {"loss": 0.0},
    "parameter_types": ["float32"], "frozen_sections": [], "sections": [{"num_parameters": 1200}],
}  # fmt: skip


def quoted(offers: Sequence[Offer], **changes: Any) -> Quote:
    made = quote_of(Resources.model_validate({**RESOURCES, **changes}), offers, 1000.0)
    assert made is not None
    return made


# ---- the quote ---------------------------------------------------------------------------------------------


def test_a_quote_counts_all_vms_at_the_dearest_offer() -> None:
    quote = quoted([*OFFERS, offer("c", SPOT, 0.4, 0.9)])
    assert [(it.zone, it.market) for it in quote.offers] == [
        ("a", SPOT),
        ("b", SPOT),
        ("a", ON_DEMAND),
        ("c", SPOT),
    ]
    assert (quote.num_vms, quote.hourly, quote.hourly_at_most) == (4, pytest.approx(0.8), pytest.approx(3.6))


def test_a_quote_counts_as_many_on_demand_vms_as_may_stand_in() -> None:
    dear = offer("a", ON_DEMAND, 2.0, 2.0)
    assert quoted([OFFERS[0], dear], on_demand_nodes=1).hourly_at_most == pytest.approx(3 * 0.6 + 2.0)
    assert quoted([dear], use_spot=False).hourly_at_most == pytest.approx(8.0)


def test_a_hourly_cap_bounds_the_vms_and_the_price_of_a_quote() -> None:
    quote = quoted(OFFERS, max_hourly_cost=2.0)
    assert (quote.num_vms, quote.hourly, quote.hourly_at_most) == (3, pytest.approx(0.6), 2.0)


def test_a_quote_says_which_price_the_user_states() -> None:
    (stated,) = quoted([offer("a", SPOT, None, 0.0)], hourly_price=0.5).offers
    assert (stated.hourly, stated.hourly_at_most, stated.price_source) == (0.5, 0.5, "the job file")


def test_what_rents_nothing_has_no_quote() -> None:
    free = Resources.model_validate({"provider": "local", "max_nodes": 2})
    assert quote_of(free, [], 1000.0) is None


# ---- in words ----------------------------------------------------------------------------------------------


def test_plan_and_price_are_told_in_lines() -> None:
    spec = parse_spec(core_spec(resources={**RESOURCES, "on_demand_nodes": 1}))
    quote = quoted(OFFERS, on_demand_nodes=1, budget=12, max_hourly_cost=3).model_dump(mode="json")
    assert list(lines(spec, quote, None, "")) == [
        "scripted: up to 4 VMs, asked for in this order:",
        "                                                           price  at most",
        "  -  spot aws g4dn.xlarge a       4 CPUs, 16 GiB, 1 GPU  $0.20/h  $0.60/h",
        "  -  spot aws g4dn.xlarge b       4 CPUs, 16 GiB, 1 GPU  $0.30/h  $0.60/h",
        "  -  on demand aws g4dn.xlarge a  4 CPUs, 16 GiB, 1 GPU  $0.60/h  $0.60/h",
        "on demand: 1 VM at most, once there were no spot VMs for 10 min",
        "plan: known once the first VM has measured the model; `makara plan` measures it here",
        "an hour: $0.80 for 4 VMs of the first kind, at most $2.40 (max_hourly_cost $3.00)",
        "in all: $12.00 (budget), which pays for 5.0 h at least, the end included",
        f"prices: a price list, {datetime.fromtimestamp(900.0):%m-%d %H:%M:%S}",
        "not counted: traffic, the store, the manager's own machine, taxes (docs/costs.md)",
    ]


def test_a_plan_that_is_known_says_how_long_the_job_takes_and_what_that_costs() -> None:
    spec = parse_spec(core_spec(resources=RESOURCES, training={"steps": 3600}))
    quote = quoted(OFFERS).model_dump(mode="json")
    calibration = uniform(2)
    cluster = PricedVms(
        num_vms=4, workers_per_vm=1, memory_bytes=None, prices=Prices(spot=None, on_demand=None)
    )
    choice = choose(request(spec, calibration, cluster))
    told = list(lines(spec, quote, choice, "measured on the VMs of job j"))
    seconds = choice.predicted_s
    (plan,) = (line for line in told if line.startswith("plan: "))
    assert f"(PxD), {seconds:.3g} s a step (measured on the VMs of job j): " in plan
    assert plan.endswith(f"{seconds:.1f} h and ${seconds * 0.8:.2f} for 3600 steps if no VM is lost")
    assert "in all: no budget: it costs that for as long as it runs" in told


# ---- the question ------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CloudManager]:
    with cloud_manager(tmp_path / "home") as running:
        yield running


@pytest.fixture
def rented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of `makara apply` for a job on a cloud; its code passes, for its check needs torch."""
    monkeypatch.setattr(cli_apply, "check_code", lambda spec, workdir, *, compare, begin: MODEL)
    path = tmp_path / "code" / "job.yaml"
    path.parent.mkdir()
    (path.parent / "train.py").write_text("def build(): ...\n")
    path.write_text(yaml.safe_dump({**job_spec(tmp_path / "store"), "resources": RESOURCES}))
    return ["apply", "-f", str(path), "--detach"]


def num_jobs(manager: CloudManager) -> int:
    return len(manager.client.get("/jobs")["jobs"])


@pytest.mark.parametrize(("said", "submitted"), [("y\n", 1), ("Yes\n", 1), ("n\n", 0), ("\n", 0), ("", 0)])
def test_a_person_is_asked_before_a_job_costs_money(
    manager: CloudManager,
    rented: list[str],
    said: str,
    submitted: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(said))
    status = cli.main([*rented, *manager.options])
    told = capsys.readouterr()
    assert "an hour: $0.6312 for 4 VMs of the first kind, at most $2.104 (no max_hourly_cost)" in told.err
    after = told.err.partition("Submit it? [y/N] ")[2].strip()
    assert after.endswith("submitting the job ..." if submitted else "nothing was submitted")
    assert ("accepted" in told.out, num_jobs(manager)) == (bool(submitted), submitted)
    assert status == (0 if submitted else cli_apply.NOT_WANTED)


def test_without_a_terminal_a_job_that_costs_money_is_refused_and_its_code_not_tried(
    manager: CloudManager,
    rented: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli_apply, "check_code", lambda *_, **__: pytest.fail("it was tried"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert cli.main([*rented, *manager.options]) == cli.MISTAKE
    assert capsys.readouterr().err == (
        "asking the manager whether it would take the job ...\n"
        "makara: the job may cost up to $2.104 an hour, and there is no terminal on which to ask whether it "
        "is wanted: -y (--yes) submits it unasked\n"
    )
    assert not num_jobs(manager)


def test_yes_shows_the_price_and_asks_nobody(
    manager: CloudManager,
    rented: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main([*rented, "-y", *manager.options]) == 0
    told = capsys.readouterr()
    assert "an hour: $0.6312" in told.err
    assert "[y/N]" not in told.err
    assert num_jobs(manager) == 1


def test_what_was_submitted_before_is_not_asked_about_again(
    manager: CloudManager, rented: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    key = ["--idempotency-key", "k"]
    assert cli.main([*rented, "-y", *key, *manager.options]) == 0
    assert cli.main([*rented, *key, *manager.options]) == 0
    assert num_jobs(manager) == 1
