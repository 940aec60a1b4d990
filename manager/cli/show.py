"""`makara ps`, `status`, `events`, `logs`, `stop`, `drain`: show jobs; end a job or a VM."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from .client import connect
from .costs.shown import ended_vms, of_vm, rate, usd
from .costs.shown import lines as cost_lines
from .progress import answers, completed, console_lines, describe_morph, ways_on

_WIDEST = 10_000  # characters of a row of a table
_NO_LOGS = (
    "no logs: a manager has those of VMs of `provider: local` alone. A machine that joined has them "
    "in vms/ of its folder, while it is the VM"
)


def ps(options: argparse.Namespace) -> int:
    with connect(options) as client:
        answer = client.get_all("/jobs", "jobs", "offset")
    if options.json:
        print(json.dumps(answer))
        return 0
    heads = ("JOB", "STATUS", "STEP", "LOSS", "PxD", "VMS", "COST", "AN HOUR", "SUBMITTED")
    owners = [job.get("owner") or "" for job in answer["jobs"]]
    several = len(set(owners)) > 1  # an administrator sees all users' jobs
    table = Table(*heads, *(("OWNER",) if several else ()), box=None, pad_edge=False)
    for job, owner in zip(answer["jobs"], owners, strict=True):
        table.add_row(*_row(job), *((owner,) if several else ()))
    print_table(table)
    return 0


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    job = completed(job)
    loss = "" if job["loss"] is None else f"{job['loss']:.3f}"
    cost = job["cost"]
    costs = ("", "") if cost is None else (usd(cost["spent"]), rate(cost["hourly"]))
    step, vms = f"{job['step']}/{job['steps']}", str(job["num_live_vms"])
    return (
        job["job"], job["status"], step, loss, job["shape"] or "", vms, *costs, _time(job["submitted_at"]),
    )  # fmt: skip


def day_and_time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def print_table(table: Table) -> None:
    """Print each row on one line, however wide, so that names are not cut off."""
    console = Console(highlight=False, markup=False)
    width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    console.width = max(console.width, width)
    console.print(table)


def status(options: argparse.Namespace) -> int:
    with connect(options) as client:
        job = client.get(f"/jobs/{options.job}")
    if options.json:
        print(json.dumps(job))
        return 0
    job = completed(job)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{job['job']}  {job['status']}" + (f": {job['reason']}" if job["reason"] else ""))
    if job["doing"]:
        console.print(f"  now            {job['doing']}")
    ways = answers(job) if job["waiting"] else []
    if job["status"] in ("stopped", "failed"):
        ways += ways_on(job)
    for line in filter(None, (job["stalled"], job["isolated"], *ways)):
        console.print(f"  {line}")
    for name, text in _lines(job):
        console.print(f"  {name:<13}  {text}")
    for morph in job["morphs"]:
        if morph["total_s"] is not None:
            console.print(f"  {describe_morph(morph)}")
    if job["traceback"]:
        console.print(job["traceback"])
    return 0


def events(options: argparse.Namespace) -> int:
    with connect(options) as client:
        answer = client.get_all(f"/jobs/{options.job}/events", "events", since=options.since)
    if options.json:
        print(json.dumps(answer))
        return 0
    for entry in answer["events"]:
        print(f"{entry['sequence']:>5}  {_time(entry['at'])}  {describe(entry['fact'])}")
        for line in console_lines(entry["fact"].get("console", "")):
            print(f"       {line}")
        for line in alternatives_lines(entry["fact"]) if options.why else ():
            print(f"       {line}")
    return 0


def logs(options: argparse.Namespace) -> int:
    with connect(options) as client:
        answer = client.get(f"/jobs/{options.job}/logs", vm=options.vm)
    if options.json:
        print(json.dumps(answer))
        return 0
    if not answer["logs"]:
        print(_NO_LOGS, file=sys.stderr)
    for name, text in answer["logs"].items():
        print(f"==> {name} <==\n{text}")
    return 0


def stop(options: argparse.Namespace) -> int:
    with connect(options) as client:
        job = client.post(f"/jobs/{options.job}/stop")
    print(json.dumps(job) if options.json else f"{job['job']} {job['status']}")
    return 0


def drain(options: argparse.Namespace) -> int:
    with connect(options) as client:
        vm = client.post(f"/vms/{options.vm}/drain")
    print(json.dumps(vm) if options.json else f"{vm['vm']} {vm['notice'] or vm['status']}")
    return 0


def alternatives_lines(fact: dict[str, Any]) -> Iterator[str]:
    """A line for each plan that was weighed, the one taken first."""
    for one in fact.get("alternatives", ()):
        step = "" if one["step_s"] is None else f": a step {one['step_s']:.3g} s"
        name = f"{one['name']} {one['shape']}{step}"
        if one["worth"] is None:
            yield f"{name}; {one['rejected'] or 'not weighed'}"
            continue
        yield (
            f"{name}, begins in {one['begins_s']:.3g} s, {3600 * one['changes_per_s']:.2g} losses an hour of "
            f"{one['change_s']:.3g} s each, worth {one['worth']:.4g} samples/s"
        )


def describe(fact: dict[str, Any]) -> str:
    """A fact in one line: its name, and its small values."""
    hidden = {
        "fact", "at", "spec", "plan", "calibration", "measurements", "recipe", "survey", "rows", "wires",
        "allreduces", "traceback", "devices", "console", "alternatives",
    }  # fmt: skip
    values = {k: v for k, v in fact.items() if k not in hidden and v not in (None, "", [], {})}
    values |= {name: _time(values[name]) for name in _TIMES if name in values}
    formed = values.pop("formed", None)
    if formed is not None:
        values |= _of_formed(formed)
    return " ".join([fact["fact"], *(f"{name}={_short(value)}" for name, value in values.items())])


def _of_formed(formed: dict[str, Any]) -> dict[str, object]:
    """What a generation began with, and what of the step in flight was kept, in contributions: micro-batches
    times sections."""
    found: dict[str, object] = {"step": formed["step"], "rung": formed["rung"]}
    kept = formed.get("in_flight")
    if kept:
        named = {"left" if name == "missing" else name: number for name, number in kept.items() if number}
        found |= {f"contributions_{name}": number for name, number in named.items()}
    return found | {"form_s": round(sum(formed["phases_s"].values()), 3)}


def _short(value: object) -> str:
    text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."


_TIMES = ("vms_until", "deadline", "detected_at", "best_until")
_OF_VM = ("vm", "status", "notice", "detail")


def _lines(job: dict[str, Any]) -> list[tuple[str, str]]:
    loss = "" if job["loss"] is None else f", loss {job['loss']:.4f}"
    rate = "" if job["samples_per_s"] is None else f", {job['samples_per_s']:.0f} samples/s"
    lines = [("trying again", trouble) for trouble in job["trouble"]]
    lines += [("note", note) for note in job["notes"]]
    lines += [("progress", f"step {job['step']} of {job['steps']}{loss}{rate}")]
    if job["shape"]:
        predicted = "" if job["predicted_s"] is None else f", predicted {job['predicted_s']:.3f} s a step"
        taken = job["seconds_per_step"]
        measured = "" if taken is None else f", measured {taken:.3f} s"
        lines.append(("plan", f"{job['shape']} (PxD), generation {job['generation']}{predicted}{measured}"))
    for seat in job["placement"]:
        where = f"replica {seat['replica']} stage {seat['stage']}"
        sections = f"sections {seat['start']}..{seat['stop'] - 1}"
        lines.append(("worker", f"{seat['worker']}  {where}  {sections}  {seat['phase'] or ''}"))
    there = [vm for vm in job["vms"] if vm["status"] != "ended" or _is_paid(vm)]
    lines += [("VM", "  ".join(filter(None, (*(vm[k] for k in _OF_VM), of_vm(vm["cost"]))))) for vm in there]
    lines += ended_vms(job, there)
    lines += cost_lines(job["cost"])
    kept = ", ".join(str(ref["step"]) for ref in job["checkpoints"])
    lines.append(("checkpoints", f"{job['checkpoint_uri']}" + (f" (steps {kept})" if kept else "")))
    if job["export_uri"]:
        lines += [("weights", job["export_uri"]), ("weight hash", job["export_sha256"])]
    return lines


def _is_paid(vm: dict[str, Any]) -> bool:
    return vm["cost"] is not None and vm["cost"]["hourly_at_most"] > 0


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%m-%d %H:%M:%S")
