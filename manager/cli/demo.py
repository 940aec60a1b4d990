"""`makara demo`: a manager, a job and a small simulated spot market, all on this machine.

A manager process is started with a folder of its own, on loopback only. Meanwhile a step of the example is
timed in plain PyTorch, to give the job as many steps as fit into `TRAINING_S`. The job is submitted without
the check of `makara apply`, since the tests check the example. While it trains, VMs are preempted and added
(see `market`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from ...simulator import read_trace
from ..providers import ResourceStatus, statuses
from ..providers.local import LocalProvider
from ..spec.job_file import read_job
from .apply import packed, submit
from .client import Client
from .market import TracePlayer
from .progress import ProgressDisplay, describe_morph
from .user_code import plain_step_s

TRAINING_S = 45.0  # on two cores, where a step takes about as long as in plain PyTorch on one
STEPS = (40, 60, 90, 130, 200)  # few choices, so that a machine gets the same one each time
_START_TIMEOUT_S = 60.0
_POLL_S = 0.25


class DemoFailed(Exception):
    """The demo could not go on; the message says why and where to look."""


def demo(options: argparse.Namespace) -> int:
    """Run the demo; returns 0 if the job finished (and, with `verify`, its weights are the same)."""
    folder: Path = (options.folder or Path("makara-demo")).expanduser().resolve()
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    run = folder / time.strftime("%Y%m%d-%H%M%S")
    job_file = _prepare(run)
    try:
        with ThreadPoolExecutor(1) as aside:
            steps = aside.submit(_num_steps, job_file, options.steps, console)
            with _manager(run) as api:
                token_file = f"{run}/home/admin.token"
                console.print(
                    f"status page  [bold]{api.url}[/bold]   (sign in with the token in {token_file})"
                )
                _edit(job_file, job_file, {"training": {"steps": steps.result()}})
                job = _train(api, job_file, console)
                _summarise(api, job, time.monotonic() - began, console)
                same = _verify(api, job, run, console) if options.verify else True
                _next_steps(run, job, console)
    except DemoFailed as error:
        console.print(f"[red]{error}[/red]")
        return 1
    return 0 if same else 1


# ---- the job -------------------------------------------------------------------------------------------


def _prepare(run: Path) -> Path:
    """A copy of the example, so that a user can look at it and change it."""
    source = example_folder()
    workdir = run / "gpt"
    shutil.copytree(
        source, workdir, ignore=shutil.ignore_patterns("__init__.py", "__pycache__", "checkpoints")
    )
    return workdir / "job.yaml"


def _num_steps(job_file: Path, wanted: int | None, console: Console) -> int:
    if wanted is not None:
        return wanted
    spec, workdir = read_job(job_file)
    seconds = plain_step_s(workdir, spec, spec.parallelism.microbatch_size or 1)
    steps = steps_for(seconds)
    console.print(f"plain PyTorch, on one thread, takes {seconds:.2f} s for a step here: {steps} steps")
    return steps


def steps_for(plain_step_s: float) -> int:
    """How many steps to train, given the seconds of one in plain PyTorch on one thread."""
    return max((steps for steps in STEPS if steps * plain_step_s <= TRAINING_S), default=STEPS[0])


def example_folder() -> Path:
    """`examples/gpt`, beside the packages in a checkout and inside them in an installation."""
    return Path(str(resources.files("makara.examples.gpt")))


def _edit(source: Path, target: Path, changes: dict[str, dict[str, Any]], suffix: str = "") -> None:
    """`suffix` is appended to the job's name."""
    values = yaml.safe_load(source.read_text())
    for section, entries in changes.items():
        values[section] = {**values.get(section, {}), **entries}
    values["name"] += suffix
    target.write_text(yaml.safe_dump(values, sort_keys=False))


def _submit(api: Client, job_file: Path) -> str:
    spec, workdir = read_job(job_file)
    form = {"spec": spec.model_dump_json(), "secrets": "{}"}
    return submit(api, form, packed(spec, workdir, {}))["job"]


def _train(api: Client, job_file: Path, console: Console) -> dict[str, Any]:
    trace = read_trace((job_file.parent / "availability.csv").read_text())
    market = TracePlayer(api, trace, lambda text: console.print(f"  [yellow]{text}[/yellow]"))
    market.open()
    name = _submit(api, job_file)
    console.print(f"job [bold]{name}[/bold] accepted: VMs boot, one of them profiles the model")
    return _follow(api, name, console, market)


def _follow(api: Client, name: str, console: Console, market: TracePlayer | None) -> dict[str, Any]:
    """Show the job until it ends, with the market's events while it trains."""
    with ProgressDisplay(console) as display:
        while True:
            job = api.get(f"/jobs/{name}")
            if market is not None:
                market.play(job)
            display.show(job)
            if job["status"] in ("finished", "failed", "stopped"):
                break
            time.sleep(_POLL_S)
    if job["status"] != "finished":
        raise DemoFailed(f"job {name} {job['status']}: {job['reason']}\n{job['traceback'] or ''}")
    return job


# ---- what came of it -----------------------------------------------------------------------------------


def _summarise(api: Client, job: dict[str, Any], wall_s: float, console: Console) -> None:
    metrics = api.get_all(f"/jobs/{job['job']}/metrics", "metrics")["metrics"]
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
        suffix="-uninterrupted",
    )
    other = _follow(api, _submit(api, second), console, None)
    same = other["export_sha256"] == job["export_sha256"]
    console.print(f"  through preemptions  {job['export_sha256']}")
    console.print(f"  uninterrupted        {other['export_sha256']}")
    console.print(
        "  [green]the weights are bit-for-bit the same[/green]" if same else "  [red]the weights differ[/red]"
    )
    return same


def _next_steps(run: Path, job: dict[str, Any], console: Console) -> None:
    home = run / "home"
    makara = "makara" if shutil.which("makara") else Path(sys.argv[0])  # its environment may not be active
    console.print("\nwhat to try next:")
    console.print(
        f"  {makara} server --home {home}        # the same manager again, with this job in its history"
    )
    console.print(f"  {makara} events {job['job']} --home {home}   # what it decided, and why")
    console.print(
        f"  {makara} apply -f {run / 'gpt' / 'job.yaml'}   # your own changes, on a manager of your own"
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
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the manager
        )
    os.environ["MAKARA_HOME"] = str(home)
    try:
        with Client(*_await_server(process, home, run)) as api:
            yield api
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
    """End VMs that still run, after an interrupted demo or an unfinished release."""
    provider = LocalProvider(home / "vms")
    for vm, status in statuses(provider.list()).items():
        if status is ResourceStatus.RUNNING:
            provider.release(vm)
    provider.close()
