"""A real manager process with local VMs and real trainers: what an end-to-end test starts, harms and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from forked import Forked
from makara.manager.cli import main as cli
from makara.manager.cli.bundle import pack
from makara.manager.cli.client import Client, Unreachable
from managers import port_for
from models import LONG_NAPS_FROM, NO_NAPS

TIMEOUT_S = 300.0
NUM_LONG = 5  # steps at the end of a job
HERE = Path(__file__).parent
_LONGEST_PAUSE_S = 0.3
_PAUSE = threading.Event()  # never set: waiting on it is how this file polls other processes


class ServiceProcess:
    """`makara server` on a home of its own. Use `start`, then `submit`; `close` ends it and every VM."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
        *,
        forked: bool = True,
    ) -> None:
        """`options`: of `makara server`, beside those that every test needs. `forked`: its process shows the
        command line and the environment of the one that it was forked from."""
        self.folder = folder
        self._options = options
        self._forked = forked
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._environment = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}
        self._no_naps = folder / "no_naps"
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self.patience_s: float | None = None
        self.client: Client

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._process = self._spawn(self.folder / "manager.log")
        wait_for(self._listens, "the manager to listen", self.logs, timeout_s=self.patience_s)
        url: str = json.loads((self.home / "server.json").read_text())["url"]
        ca_file = self.home / "ca.pem" if url.startswith("https:") else None
        self.client = Client(url, (self.home / "admin.token").read_text().strip(), ca_file)
        wait_for(self._answers, "the manager to answer", self.logs, timeout_s=self.patience_s)

    def kill(self) -> None:
        """SIGKILL: the manager ends at whatever instruction it is."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.client.close()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
            self.client.close()
        for process in self.vm_processes():
            process.kill()

    def _spawn(self, log: Path) -> subprocess.Popen[bytes] | Forked:
        port = str(port_for(self.home))
        server = ["server", "--home", str(self.home), "--port", port, *self._options]
        if self._forked:
            return Forked(cli.main, server, log=log, environment=self._environment)
        return self._run([sys.executable, "-m", "makara.manager.cli", *server], log)

    def _run(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
            )

    def _listens(self) -> bool:
        """Whether the manager just started has written its address; an earlier one wrote there too."""
        file = self.home / "server.json"
        assert self._process is not None
        return file.exists() and json.loads(file.read_text())["pid"] == self._process.pid

    def _answers(self) -> bool:
        try:
            return bool(self.client.get("/jobs")) or True
        except Unreachable:
            return False

    # ---- jobs ----------------------------------------------------------------------------------------------

    def submit(self, code: str | Path, secrets: Mapping[str, str] | None = None, **sections: Any) -> str:
        """Submit a job; `code` is the text of train.py or a folder, `sections` those of the job file."""
        workdir = self.folder / f"code{time.monotonic_ns()}"
        if isinstance(code, Path):
            shutil.copytree(code, workdir)
        else:
            workdir.mkdir()
            (workdir / "train.py").write_text(code)
        spec = {
            "name": "job",
            "entrypoint": "train:build",
            "secrets": sorted(secrets or {}),
            **sections,
            "envs": {**self._naps(sections), **sections.get("envs", {})},
            "resources": {"provider": "local", "max_nodes": 1, **sections.get("resources", {})},
            "checkpoint": {"uri": f"file://{self.folder}/store", **sections.get("checkpoint", {})},
        }
        answer = self.client.post(
            "/jobs",
            data={"spec": json.dumps(spec), "secrets": json.dumps(dict(secrets or {}))},
            files={"bundle": ("bundle.tar.gz", pack(workdir, max_bytes=1 << 26), "application/gzip")},
        )
        return answer["job"]

    def _naps(self, sections: Mapping[str, Any]) -> dict[str, str]:
        """The environment of `models.slow_gpt`: its last steps are long, so that a job does not end while a
        busy machine starts processes."""
        steps = sections.get("training", {}).get("steps", 0)
        last = {LONG_NAPS_FROM: str(steps - NUM_LONG)} if steps > 2 * NUM_LONG else {}
        return {NO_NAPS: str(self._no_naps), **last}

    def end_naps(self) -> None:
        """Steps of `models.slow_gpt` take no longer than their arithmetic from now on."""
        self._no_naps.touch()

    def job(self, job: str) -> dict[str, Any]:
        return self.client.get(f"/jobs/{job}")

    def wait(self, job: str, predicate: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Poll until `predicate`; a job that ended meanwhile fails the test, unless that was waited for."""
        seen: dict[str, Any] = {}

        def check() -> bool:
            try:
                seen.update(self.job(job))
            except (Unreachable, httpx.TransportError):
                return False
            if predicate(seen):
                return True
            ended = seen["status"] in ("failed", "finished", "stopped")
            assert not ended, f"{what}: {seen['status']} {seen['reason']}\n{seen['traceback']}\n{self.logs()}"
            return False

        wait_for(
            check,
            what,
            lambda: f"{json.dumps(seen, indent=1)[:6000]}\n{self.logs()}",
            timeout_s=self.patience_s,
        )
        return seen

    def wait_status(self, job: str, status: str) -> dict[str, Any]:
        return self.wait(job, lambda view: view["status"] == status, f"{job} to be {status}")

    def wait_step(self, job: str, step: int) -> dict[str, Any]:
        def reached(view: dict[str, Any]) -> bool:
            return view["step"] >= step and view["status"] == "running"

        return self.wait(job, reached, f"{job} to run at step {step}")

    def losses(self, job: str) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.client.get(f"/jobs/{job}/metrics")["metrics"]}

    # ---- VMs -----------------------------------------------------------------------------------------------

    def live(self, job: str) -> list[str]:
        return [vm["vm"] for vm in self.job(job)["vms"] if vm["status"] in ("joined", "noticed")]

    def vm_processes(self, vm: str | None = None) -> list[psutil.Process]:
        """The agent and the trainers of one VM, or of all VMs of this manager's home."""
        where = f"{self.home}/vms/{vm}/" if vm else f"{self.home}/vms/"
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline"]):
            if any(part.startswith(where) for part in process.info["cmdline"] or ()):
                found.append(process)
        return found

    def vms_alive(self) -> list[str]:
        """VMs by their processes, also when there is no manager to ask."""
        boots = [Path(p.cmdline()[-1]) for p in self.vm_processes() if p.cmdline()[-1].endswith("boot.json")]
        return sorted(boot.parent.name for boot in boots)

    def kill_vm(self, vm: str) -> None:
        """SIGKILL to the agent and the trainers at once, as when the cloud takes the machine."""
        self.signal_vm(vm, signal.SIGKILL)

    def signal_vm(self, vm: str, number: int) -> None:
        for process in self.vm_processes(vm):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def trainer(self, vm: str) -> psutil.Process:
        return next(p for p in self.vm_processes(vm) if "makara.worker.trainer" in p.cmdline())

    def fault(self, vm: str, kind: str, deadline_s: float = 0.0) -> None:
        self.client.post(f"/vms/{vm}/fault", json={"kind": kind, "deadline_s": deadline_s})

    def set_capacity(self, vms: int) -> None:
        self.client.post("/providers/local/capacity", json={"vms": vms})

    def logs(self) -> str:
        """The ends of all logs, for the message of a failed test."""
        files = [self.folder / "manager.log", *sorted(self.home.glob("vms/*/*.log"))]
        ends = [f"--- {file}\n{file.read_text(errors='replace')[-1500:]}" for file in files if file.exists()]
        return "\n".join(ends)


def wait_for(
    check: Callable[[], bool],
    what: str,
    details: Callable[[], str],
    pause_s: float = 0.1,
    timeout_s: float | None = None,
) -> None:
    """Poll another process's visible state, ever less often: to look costs both processes more than a trainer
    takes for its steps. Raises `AssertionError` with `details()` after `timeout_s`, or `TIMEOUT_S`."""
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}\n{details()}"
        _PAUSE.wait(pause_s)
        pause_s = min(1.2 * pause_s, max(pause_s, _LONGEST_PAUSE_S))
