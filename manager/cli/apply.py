"""`makara apply` and `follow`: check a job file and its code, submit them, and show progress."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ...checkpoint import StoreUri
from ..config import ServerConfig
from ..spec.job_file import read_job
from ..spec.job_spec import JobSpec, JobSpecError
from ..spec.start_source import other_weights
from .bundle import linked_folders, pack
from .check import notes, summary
from .client import Client, NoAnswer, RequestRefused, Unreachable, connect
from .costs.asking import check_somebody_answers, is_wanted
from .progress import ProgressDisplay, ways_on
from .progress_lines import ProgressLines
from .resume import values_of
from .stages import Stages, writer
from .user_code import UserCodeRefused, settings_of, try_out

_ENDED = ("finished", "stopped", "failed")
NOT_WANTED = 1  # the exit status, which is that of a job that failed as well
_RETRY_S = 1.0
_CHECK_S = 180.0  # the manager gives its address and the clouds 45 s each, and asks the store as well
_GO_ON = (
    "Where the model's forward, backward or weights differ and that is well so: --skip-comparison leaves the "
    "step out, and says so"
)
_MAX_DRY_RUN_S = 30.0  # the user waits for it; `makara check` has no limit


def apply(options: argparse.Namespace) -> int:
    """Check, pack, confirm if it costs money, submit, follow."""
    spec, workdir = read_job(options.file)
    form = {"spec": spec.model_dump_json(), "secrets": json.dumps(values_of(spec.secrets))}
    headers = {"Idempotency-Key": options.idempotency_key} if options.idempotency_key else {}
    with Stages(writer(options)) as stages:
        begin = stages.begin
        begin("asking the manager whether it would take the job")
        with connect(options) as client:
            # Before trying the code, which takes half a minute.
            answer = client.post("/jobs/check", data=form, headers=headers, timeout=_CHECK_S) or {}
        quote = answer.get("quote")
        check_somebody_answers(options, quote)
        begin("packing the code")
        bundle = packed(spec, workdir, answer)
        start = answer.get("start")
        tried = _as_started(spec, start)
        model = check_code(tried, workdir, compare=not options.skip_comparison, begin=begin)
    _check_start(start, model)
    _check_sizes(spec, answer.get("machines", ()), model)
    if not options.json:
        print(*_left_out(spec, workdir), *notes(model), summary(model), sep="\n", file=sys.stderr)
    if quote is not None and not is_wanted(options, spec, quote):
        return NOT_WANTED
    with connect(options) as client:
        with Stages(writer(options)) as stages:
            stages.begin("submitting the job")
            answer = submit(client, form, bundle, options.idempotency_key)
        accepted = f"job {answer['job']} accepted; status page: {client.url}"
        if not options.json:
            print(accepted, flush=True)
        elif options.detach:
            print(json.dumps(answer))
        return 0 if options.detach else follow(client, answer["job"], options.json)


def submit(client: Client, form: Mapping[str, str], bundle: bytes, key: str | None = None) -> dict[str, Any]:
    """Post a job; returns the manager's answer, which names it.

    Without an answer in time it is posted once more. Both have the same key, so that they are one job.
    """
    key = key or secrets.token_hex(16)
    files = {"bundle": ("bundle.tar.gz", bundle, "application/gzip")}
    headers = {"Idempotency-Key": key}
    post = partial(client.post, "/jobs", data=form, files=files, headers=headers, timeout=_CHECK_S)
    try:
        return post()
    except NoAnswer:
        pass
    try:
        return post()
    except Unreachable as error:
        what = f"it may have accepted the job: `makara ps` tells, and --idempotency-key {key} sends it again"
        raise Unreachable(f"{error}; {what}") from error


def packed(spec: JobSpec, workdir: Path, limits: Mapping[str, Any]) -> bytes:
    """The job's code as an archive. A manager of an older version reports no limits: it has the defaults."""
    config = ServerConfig(home=workdir)
    bounds = config.bundle_bounds
    return pack(
        workdir,
        max_bytes=limits.get("packed_bytes", config.max_bundle_bytes),
        also_exclude=_local_store(spec),
        bounds=replace(
            bounds,
            members=limits.get("files", bounds.members),
            unpacked_bytes=limits.get("unpacked_bytes", bounds.unpacked_bytes),
        ),
    )


def _left_out(spec: JobSpec, workdir: Path) -> list[str]:
    """The code was tried with what a link leads to, and VMs do not have it."""
    return [
        f"note: {name}, a link to a folder, is left out of what VMs get: put the folder itself below "
        f"{workdir}, or read the data from where all VMs reach it (docs/job-file.md, Data)"
        for name in linked_folders(workdir, _local_store(spec))
    ]


def follow_command(options: argparse.Namespace) -> int:
    """Follow a job that was submitted before."""
    with connect(options) as client:
        return follow(client, options.job, options.json)


# ---- the check ---------------------------------------------------------------------------------------------


def check_code(
    spec: JobSpec, workdir: Path, *, compare: bool = True, begin: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Try the job's code in a separate process, which names its stages to `begin`; returns facts about its
    model. Raises `UserCodeRefused`."""
    settings = {**settings_of(spec), "max_seconds": _MAX_DRY_RUN_S, "compare": compare}
    trial = try_out(workdir, spec.entrypoint, settings, spec.envs, begin)
    if trial.model is None or trial.error is not None:
        raise UserCodeRefused(trial.refusal if trial.model is None else f"{trial.refusal}\n{_GO_ON}")
    return trial.model


def _as_started(spec: JobSpec, start: dict[str, Any] | None) -> JobSpec:
    """The job with m and K of the checkpoint that it starts from."""
    if start is None:
        return spec
    sizes = {name: start[name] for name in ("microbatch_size", "num_sections")}
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update=sizes)})


def _check_start(start: dict[str, Any] | None, model: dict[str, Any]) -> None:
    """Raise `JobSpecError` if the checkpoint that the job starts from is of another model."""
    if start is None:
        return
    differs = other_weights(start["weights"], model["weights"])
    same_torch = start["torch_version"] == model["torch_version"]
    if not differs and same_torch and start["graph_hash"] != model["graph_hash"]:
        differs = "its weights have the same names and shapes, but what it computes with them is another"
    if differs:
        what = f"step {start['step']} of job {start['job']} is of another model: {differs}"
        raise JobSpecError([("checkpoint.start_from", what)])


def _check_sizes(spec: JobSpec, machines: Sequence[Mapping[str, Any]], model: dict[str, Any]) -> None:
    """Raise `JobSpecError` for types of VM too small for a section, or too few VMs for the whole model.

    `machines`: the types, from the manager. Only weights and gradients are counted, so a job that passes may
    still need more.
    """
    if not machines:
        return
    sizes = _least_bytes(model)
    largest = max(sizes)
    known = {it["instance_type"]: it["worker_bytes"] for it in machines if it["worker_bytes"] is not None}
    needs = f"section {sizes.index(largest)} of the model needs {_mib(largest)} for weights and gradients"
    faults = [
        ("resources.instance_type", f"{name} has {_mib(has)} for each worker, and {needs}")
        for name, has in known.items()
        if has < largest
    ]
    most = spec.resources.most_workers * max(known.values(), default=0)
    if len(known) == len(machines) and not faults and most < sum(sizes):
        needs = f"weights and gradients of the model need {_mib(sum(sizes))}"
        faults.append(("resources.max_nodes", f"all workers together have {_mib(most)}, and {needs}"))
    if faults:
        raise JobSpecError(faults)


def _least_bytes(model: dict[str, Any]) -> list[int]:
    """For each section, the least memory of a worker that hosts it."""
    each = 4 if model["parameter_types"] == ["float32"] else 2
    frozen = set(model["frozen_sections"])
    return [
        each * section["num_parameters"] * (1 if index in frozen else 2)
        for index, section in enumerate(model["sections"])
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _local_store(spec: JobSpec) -> tuple[Path, ...]:
    folder = StoreUri.of(spec.checkpoint.uri).folder
    return () if folder is None else (folder,)


# ---- following ---------------------------------------------------------------------------------------------


def follow(client: Client, job: str, as_json: bool) -> int:
    """Show progress until the job ends; 0 unless it failed. Ctrl-C leaves the job alone."""
    try:
        view = _watch_json(client, job) if as_json else _watch(client, job)
    except KeyboardInterrupt:
        if not as_json:
            print(f"\nleft; the job goes on. Come back with: makara follow {job}")
        return 0
    if as_json:
        return 1 if view["status"] == "failed" else 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{view['job']} {view['status']}" + (f": {view['reason']}" if view["reason"] else ""))
    if view["status"] == "failed":
        for line in (view["traceback"], *ways_on(view)):
            if line:
                console.print(line)
        return 1
    if view["export_uri"]:
        console.print(f"weights      {view['export_uri']}\nweight hash  {view['export_sha256']}")
    return 0


def _watch(client: Client, job: str) -> dict[str, Any]:
    console = Console(highlight=False, soft_wrap=True)
    with ProgressDisplay(console) if console.is_terminal else ProgressLines(console) as display:
        for event, data in _events(client, job):
            if event == "status":
                if display.show(data) and data["status"] not in _ENDED:
                    display.tell(_after_a_death(client, data["job"]))
                if data["status"] in _ENDED:
                    return data
            elif event == "step":
                display.show_step(data)
    raise AssertionError("the events of a job go on until it has ended")


def _after_a_death(client: Client, job: str) -> str:
    """What the death of a VM costs the running plan, in a sentence; empty if no answer says it."""
    try:
        return client.get(f"/jobs/{job}/plan").get("after_a_death", "")
    except (RequestRefused, Unreachable):
        return ""  # no plan runs any more, or the manager is away, which following the job deals with


def _watch_json(client: Client, job: str) -> dict[str, Any]:
    for event, data in _events(client, job):
        print(json.dumps({"event": event, **data}), flush=True)
        if event == "status" and data["status"] in _ENDED:
            return data
    raise AssertionError("the events of a job go on until it has ended")


def _events(client: Client, job: str) -> Iterator[tuple[str, Any]]:
    """Yield updates without end; waits for a manager that is away, since training goes on without it.

    If the job was given by name, later updates are of the same job.
    """
    lost = False
    while True:
        try:
            with client.stream(f"/jobs/{job}/stream") as events:
                lost = False
                for event, data in events:
                    job = data["job"] if event == "status" else job
                    yield event, data
        except Unreachable as error:
            if not lost:
                print(f"makara: {error}; training goes on, trying again", file=sys.stderr)
            lost = True
        time.sleep(_RETRY_S)
