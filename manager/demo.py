"""`makara demo`: a manager, a job and a slice of a spot market's history, all on this machine.

A manager process is started with a folder of its own and no other address than loopback. The example job is
submitted as a user would, and while it trains, VMs are taken and given back as the availability trace says.
The trace's clock is the job's progress: the trace's end is the job's end, on a fast machine and on a slow
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from ..simulator import Change, TraceEvent, read_trace
from .client import Client, Refused
from .progress import ProgressDisplay, counted, describe_morph
from .providers import VmStatus
from .providers.local import LocalProvider

NOTICE_S = 8.0
_TRACE_STEPS = 0.95  # the trace's last event falls at this part of the job
_START_TIMEOUT_S = 60.0
_POLL_S = 0.25


class DemoFailed(Exception):
    """The demo could not go on; the message says why and where to look."""


@dataclass
class DemoOptions:
    """What the command line lets a user choose."""

    folder: Path = field(default_factory=lambda: Path.cwd() / "makara-demo")
    steps: int | None = None
    verify: bool = False


class Market:
    """Plays an availability trace against the local provider, by the job's progress.

    The trace's nodes are bound to VMs as they come up; how many may live at a time is the provider's
    capacity. The first removal comes with a notice of `NOTICE_S` seconds (traces hold none), the others
    without.
    """

    def __init__(self, api: Client, events: tuple[TraceEvent, ...], console: Console) -> None:
        self._api = api
        self._console = console
        self._pending = list(events)
        self._span_ms = events[-1].time_ms
        self._nodes: list[str] = []
        self._vm_of: dict[str, str] = {}
        self._noticed = False

    def play(self, job: dict[str, Any], progress: float) -> None:
        """Let everything happen that falls before `progress` (0..1) of the trace."""
        due = [e for e in self._pending if e.time_ms <= progress * self._span_ms]
        self._pending = self._pending[len(due) :]
        self._bind(job)
        for event in due:
            if event.change is Change.ADD:
                self._nodes.append(event.node)
        removed = [event.node for event in due if event.change is Change.REMOVE]
        if due:
            self._nodes = [node for node in self._nodes if node not in removed]
            self._offer(len(self._nodes))
        added = [event.node for event in due if event.change is Change.ADD]
        if added and progress > 0:
            self._say(f"the market offers {counted(len(added), 'more VM')}")
        if removed:
            self._take(removed)

    def _bind(self, job: dict[str, Any]) -> None:
        live = [vm["vm"] for vm in job["vms"] if vm["status"] == "joined"]
        self._vm_of = {node: vm for node, vm in self._vm_of.items() if vm in live}
        free = [vm for vm in live if vm not in self._vm_of.values()]
        for node in self._nodes:
            if node not in self._vm_of and free:
                self._vm_of[node] = free.pop(0)

    def _take(self, nodes: list[str]) -> None:
        vms = [self._vm_of.pop(node) for node in nodes if node in self._vm_of]
        if not vms:
            return  # they never came up: only the capacity shrinks
        if not self._noticed:
            self._noticed = True
            self._say(f"the market takes {', '.join(vms)}, with {NOTICE_S:g} s of notice")
            for vm in vms:
                self._harm(vm, "notice", NOTICE_S)
            return
        self._say(f"the market takes {' and '.join(vms)} without a word")
        for vm in vms:
            self._harm(vm, "kill")

    def offer_all(self) -> None:
        """Before the first event: as many VMs as the trace begins with."""
        self._offer(sum(event.time_ms == 0 for event in self._pending))

    def _offer(self, vms: int) -> None:
        self._api.post("/providers/local/capacity", json={"vms": vms})

    def _harm(self, vm: str, kind: str, deadline_s: float = 0.0) -> None:
        try:
            self._api.post(f"/vms/{vm}/fault", json={"kind": kind, "deadline_s": deadline_s})
        except Refused as refusal:
            if refusal.status != 404:
                raise
            self._say(f"{vm} was gone already")

    def _say(self, text: str) -> None:
        self._console.print(f"  [yellow]{text}[/yellow]")


def run_demo(options: DemoOptions) -> int:
    """Run it; the exit status: 0 when the job finished (and, with `verify`, its weights are the same)."""
    console = Console(highlight=False, soft_wrap=True)
    run = options.folder / time.strftime("%Y%m%d-%H%M%S")
    job_file = _prepare(run, options)
    try:
        with _manager(run) as api:
            console.print(
                f"status page  [bold]{api.url}[/bold]   (sign in with the token in {run}/home/admin.token)"
            )
            began = time.monotonic()
            job = _train(api, job_file, console)
            _summarise(api, job, time.monotonic() - began, console)
            same = _verify(api, job, run, console) if options.verify else True
            _next_steps(run, job, console)
    except DemoFailed as error:
        console.print(f"[red]{error}[/red]")
        return 1
    return 0 if same else 1


# ---- the job -------------------------------------------------------------------------------------------


def _prepare(run: Path, options: DemoOptions) -> Path:
    """A copy of the example, so that a user can look at it and change it."""
    source = example_folder()
    workdir = run / "gpt"
    shutil.copytree(
        source, workdir, ignore=shutil.ignore_patterns("__init__.py", "__pycache__", "checkpoints")
    )
    job_file = workdir / "job.yaml"
    if options.steps is not None:
        _edit(job_file, job_file, {"training": {"steps": options.steps}})
    return job_file


def example_folder() -> Path:
    """`examples/gpt`, beside the packages in a checkout and inside them in an installation."""
    return Path(str(resources.files("makara.examples.gpt")))


def _edit(source: Path, target: Path, changes: dict[str, dict[str, Any]]) -> None:
    values = yaml.safe_load(source.read_text())
    for section, entries in changes.items():
        values[section] = {**values.get(section, {}), **entries}
    target.write_text(yaml.safe_dump(values, sort_keys=False))


def _apply(api: Client, job_file: Path) -> str:
    command = [
        sys.executable,
        "-P",
        "-m",
        "makara.manager.cli",
        "apply",
        "-f",
        str(job_file),
        "--detach",
        "--json",
    ]
    answer = subprocess.run(
        [*command, "--server", api.url], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if answer.returncode != 0:
        raise DemoFailed(f"makara apply -f {job_file} failed:\n{answer.stderr or answer.stdout}")
    return json.loads(answer.stdout)["job"]


def _train(api: Client, job_file: Path, console: Console) -> dict[str, Any]:
    trace = read_trace((job_file.parent / "availability.csv").read_text())
    market = Market(api, trace, console)
    market.offer_all()
    console.print("checking and submitting examples/gpt/job.yaml (traces the model on this machine first)")
    name = _apply(api, job_file)
    console.print(f"job [bold]{name}[/bold] accepted: VMs boot, one of them profiles the model")
    return _follow(api, name, console, market)


def _follow(api: Client, name: str, console: Console, market: Market | None) -> dict[str, Any]:
    """Show the job until it ends; while it trains, let the market do its worst."""
    with ProgressDisplay(console) as display:
        while True:
            job = api.get(f"/jobs/{name}")
            if market is not None:
                trained = job["step"] / job["steps"] / _TRACE_STEPS
                if job["status"] == "running" or trained == 0:
                    market.play(job, min(1.0, trained))
            display.show(job)
            if job["status"] in ("finished", "failed", "stopped"):
                break
            time.sleep(_POLL_S)
    if job["status"] != "finished":
        raise DemoFailed(f"job {name} {job['status']}: {job['reason']}\n{job['traceback'] or ''}")
    return job


# ---- what came of it -----------------------------------------------------------------------------------


def _summarise(api: Client, job: dict[str, Any], wall_s: float, console: Console) -> None:
    metrics = api.get(f"/jobs/{job['job']}/metrics")["metrics"]
    useful_s = sum(step["seconds"] for step in metrics)
    formed = [morph for morph in job["morphs"] if morph["step"] is not None]
    console.print()
    console.print(f"[bold]{job['name']}[/bold]: {job['step']} steps in {wall_s:.0f} s")
    console.print(
        f"  loss         {metrics[0]['loss']:.3f} at the first step, {metrics[-1]['loss']:.3f} at the last"
    )
    console.print(
        f"  useful time  {useful_s:.0f} s in steps that count, {100 * useful_s / wall_s:.0f} % of the wall "
        "time (which includes booting, profiling and the export)"
    )
    console.print(f"  morphs       {len(formed)}:")
    for morph in formed:
        console.print("    " + describe_morph(morph))
    console.print(f"  shapes       {', '.join(dict.fromkeys(morph['shape'] for morph in formed))}")
    console.print(f"  checkpoints  {job['checkpoint_uri']}")
    console.print(f"  weights      {job['export_uri']}")
    console.print(f"  weight hash  {job['export_sha256']}")


def _verify(api: Client, job: dict[str, Any], run: Path, console: Console) -> bool:
    """Train the same recipe again on one VM, without interruption, and compare the weights bit for bit."""
    console.print("\nthe same recipe once more: one VM, P=1, D=1, nobody dies")
    first = run / "gpt" / "job.yaml"
    second = run / "gpt" / "uninterrupted.yaml"
    _edit(
        first,
        second,
        {
            "resources": {"min_nodes": 1, "max_nodes": 1, "device_memory": None},
            "parallelism": {
                "pipeline_parallel_degree": 1,
                "data_parallel_degree": 1,
                "microbatch_size": job["microbatch_size"],
                "num_sections": job["num_sections"],
            },
        },
    )
    values = yaml.safe_load(second.read_text())
    second.write_text(yaml.safe_dump({**values, "name": f"{values['name']}-uninterrupted"}, sort_keys=False))
    other = _follow(api, _apply(api, second), console, None)
    same = other["export_sha256"] == job["export_sha256"]
    console.print(f"  through preemptions  {job['export_sha256']}")
    console.print(f"  uninterrupted        {other['export_sha256']}")
    console.print(
        "  [green]the weights are bit-for-bit the same[/green]" if same else "  [red]the weights differ[/red]"
    )
    return same


def _next_steps(run: Path, job: dict[str, Any], console: Console) -> None:
    home = run / "home"
    console.print("\nwhat to try next:")
    console.print(
        f"  makara server --home {home}        # the same manager again, with this job in its history"
    )
    console.print(f"  makara events {job['job']} --home {home}   # what it decided, and why")
    console.print(
        f"  makara apply -f {run / 'gpt' / 'job.yaml'}   # your own changes, on a manager of your own"
    )


# ---- the manager ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _manager(run: Path) -> Generator[Client]:
    home = run / "home"
    home.mkdir(parents=True)
    with open(run / "manager.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "makara.manager.cli", "server", "--home", str(home), "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the manager in order
        )
    os.environ["MAKARA_HOME"] = str(home)
    try:
        url, token = _await_server(process, home, run)
        api = Client(url, token)
        try:
            yield api
        finally:
            api.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        _release_rest(home)


def _await_server(process: subprocess.Popen[bytes], home: Path, run: Path) -> tuple[str, str]:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(FileNotFoundError, httpx.TransportError, json.JSONDecodeError):
            url: str = json.loads((home / "server.json").read_text())["url"]
            if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                return url, (home / "admin.token").read_text().strip()
        time.sleep(0.1)
    raise DemoFailed(f"the manager did not start; its log is {run}/manager.log")


def _release_rest(home: Path) -> None:
    """End the VMs that still run: those of a demo that was broken off, or that were just being released."""
    provider = LocalProvider(home / "vms")
    for vm, status in provider.list().items():
        if status is VmStatus.RUNNING:
            provider.release(vm)
    provider.close()
