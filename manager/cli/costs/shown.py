"""A job's costs in words, for `makara status` and `ps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

_MARKETS = {"spot": "spot", "on_demand": "on demand"}


def usd(amount: float) -> str:
    """An amount with two decimals; below ten cents with four."""
    text = f"{abs(amount):,.2f}" if abs(amount) >= 0.1 or amount == 0.0 else f"{abs(amount):.4f}"
    return f"-${text}" if amount < 0.0 else f"${text}"


def rate(hourly: float) -> str:
    """A price per hour with two to four decimals, as clouds write them."""
    whole, _, digits = f"{hourly:,.4f}".partition(".")
    return f"${whole}.{digits.rstrip('0').ljust(2, '0')}"


def lines(cost: dict[str, Any] | None) -> Iterable[tuple[str, str]]:
    """A job's costs; empty for a job without clouds."""
    if cost is None:
        return
    parts = [
        f"{title} {usd(cost[market]['spent'])}" for market, title in _MARKETS.items() if cost[market]["spent"]
    ]
    yield "cost so far", f"{_with(usd(cost['spent']), parts)}; at most {usd(cost['at_most'])}"
    parts = [_of_market(title, cost[market]) for market, title in _MARKETS.items() if cost[market]["num_vms"]]
    yield "cost an hour", f"{_with(rate(cost['hourly']), parts)}; at most {rate(cost['hourly_at_most'])}"
    if cost["max_hourly_cost"] is not None:
        yield "hourly cap", f"{usd(cost['max_hourly_cost'])}, of which {usd(cost['hourly_left'])} is left"
    if cost["budget"] is not None:
        yield "budget", f"{usd(cost['budget'])}, of which {usd(cost['budget_left'])} is left"
    for source, at in cost["prices"].items():
        yield "prices", f"{source}, {datetime.fromtimestamp(at):%m-%d %H:%M:%S}"


def of_vm(cost: dict[str, Any] | None) -> str:
    """Where the VM is, its cost per hour while it exists, and its cost so far."""
    if cost is None:
        return ""
    parts = [where(cost)]
    if cost["hourly_at_most"]:
        parts.append(f"{rate(cost['hourly'])}/h, at most {rate(cost['hourly_at_most'])}/h")
    return "  ".join([*parts, f"{usd(cost['spent'])} so far"])


def ended_vms(job: dict[str, Any], there: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """The cost of VMs that are gone."""
    number = job["num_vms"] - len(there)
    if job["cost"] is not None and number:
        spent = job["cost"]["spent"] - sum(vm["cost"]["spent"] for vm in there if vm["cost"] is not None)
        yield "ended VMs", f"{number}  {usd(max(0.0, spent))}"


def where(placement: Mapping[str, Any]) -> str:
    place = placement["zone"] or placement["region"]
    return " ".join((_MARKETS[placement["market"]], placement["provider"], placement["instance_type"], place))


def _of_market(title: str, cost: dict[str, Any]) -> str:
    return f"{cost['num_vms']} {title} {rate(cost['hourly'])}"


def _with(total: str, parts: list[str]) -> str:
    return f"{total} ({', '.join(parts)})" if parts else total
