"""Shows plan and price of a job that rents VMs, and asks for confirmation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from ....morphing import Choice, Infeasible, choose
from ...home import ConfigError
from ...replay import Prices
from ...spec.job_spec import JobSpec, JobSpecError
from ..calibration.source import of_manager
from ..calibration.table import aligned
from ..client import agreed
from ..plan_text import PricedVms, request
from ..progress import counted
from ..warm_up import wait_for_code
from .shown import rate, usd, where


def check_somebody_answers(options: argparse.Namespace, quote: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` if a confirmation will be needed and there is no terminal."""
    if quote is not None and not options.yes and not sys.stdin.isatty():
        at_most = f"up to {rate(quote['hourly_at_most'])} an hour"
        why = f"the job may cost {at_most}, and there is no terminal on which to ask whether it is wanted"
        raise ConfigError(f"{why}: -y (--yes) submits it unasked")


def is_wanted(options: argparse.Namespace, spec: JobSpec, quote: Mapping[str, Any]) -> bool:
    """Show plan and price on stderr, and ask, unless -y was given."""
    for line in lines(spec, quote, *_predicted(options, spec, quote)):
        print(line, file=sys.stderr)
    if options.yes or agreed("Submit it?"):
        return True
    print("nothing was submitted", file=sys.stderr)
    return False


def lines(
    spec: JobSpec, quote: Mapping[str, Any], choice: Choice | Infeasible | None, source: str
) -> Iterable[str]:
    """The text. `choice`: the plan on all VMs of the first offer, if measured (as `source` says)."""
    how = ", by price over speed" if quote["order"] == "price" else ""
    yield f"{spec.name}: up to {counted(quote['max_nodes'], 'VM')}, asked for in this order{how}:"
    rows = [["", "", "", "price", "at most"], *(_row(offer) for offer in quote["offers"])]
    yield from (f"  {line}" for line in aligned(rows, left=3))
    if 0 < quote["on_demand_nodes"] < quote["max_nodes"]:
        minutes = quote["on_demand_after_s"] / 60.0
        number = counted(quote["on_demand_nodes"], "VM")
        yield f"on demand: {number} at most, once there were no spot VMs for {minutes:g} min"
    yield f"plan: {_plan(spec, quote, choice, source)}"
    what = f"{rate(quote['hourly'])} for {counted(quote['num_vms'], 'VM')} of the first kind"
    yield f"an hour: {what}, {_cap(quote)}"
    yield f"in all: {_budget(quote)}"
    for name, at in {offer["price_source"]: offer["price_at"] for offer in quote["offers"]}.items():
        yield f"prices: {name}, {datetime.fromtimestamp(at):%m-%d %H:%M:%S}"
    yield "not counted: traffic, the store, the manager's own machine, taxes (docs/costs.md)"


def _row(offer: Mapping[str, Any]) -> list[str]:
    has = [f"{offer['num_cpus']} CPUs"] if offer["num_cpus"] is not None else []
    has += [f"{offer['memory_bytes'] / 2**30:g} GiB"] if offer["memory_bytes"] is not None else []
    has += [counted(offer["num_gpus"], "GPU")] if offer["num_gpus"] else []
    at_most = f"{rate(offer['hourly_at_most'])}/h"
    return ["-", where(offer), ", ".join(has), f"{rate(offer['hourly'])}/h", at_most]


def _cap(quote: Mapping[str, Any]) -> str:
    cap = quote["max_hourly_cost"]
    at_most = f"at most {rate(quote['hourly_at_most'])}"
    return f"{at_most} (no max_hourly_cost)" if cap is None else f"{at_most} (max_hourly_cost {usd(cap)})"


def _budget(quote: Mapping[str, Any]) -> str:
    if quote["budget"] is None:
        return "no budget: it costs that for as long as it runs"
    hours = quote["budget"] / quote["hourly_at_most"]
    return f"{usd(quote['budget'])} (budget), which pays for {hours:.1f} h at least, the end included"


def _plan(spec: JobSpec, quote: Mapping[str, Any], choice: Choice | Infeasible | None, source: str) -> str:
    if choice is None:
        return "known once the first VM has measured the model; `makara plan` measures it here"
    if isinstance(choice, Infeasible):
        return f"none for {counted(quote['num_vms'], 'VM')} ({source}): {choice.reason}"
    seconds = choice.candidate.predicted_s or 0.0
    hours = spec.training.steps * seconds / 3600.0
    about = (
        f"{hours:.1f} h and {usd(hours * quote['hourly'])} for {spec.training.steps} steps if no VM is lost"
    )
    return f"{choice.candidate.shape} (PxD), {seconds:.3g} s a step ({source}): {about}"


def _predicted(
    options: argparse.Namespace, spec: JobSpec, quote: Mapping[str, Any]
) -> tuple[Choice | Infeasible | None, str]:
    """The plan by the measurements of the manager's newest job of that name, if there are any."""
    source = of_manager(options, spec.name)
    if source is None or not quote["num_vms"]:
        return None, ""
    cluster = PricedVms(
        num_vms=quote["num_vms"],
        workers_per_vm=spec.resources.workers_per_node,
        memory_bytes=spec.resources.device_memory,
        prices=Prices(spot=None, on_demand=None),
    )
    try:
        calibration = source.calibration(spec, cluster.memory_bytes, cluster.num_workers)
    except JobSpecError:
        return None, ""  # they are of another K or m: this job will be measured itself
    wait_for_code()
    return choose(request(spec, calibration, cluster)), source.where
