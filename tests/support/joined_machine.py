"""`makara join`, run as its own process: a machine that a test lends to a manager."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from forked import Forked
from makara.manager.cli import main as cli


class JoinedMachine:
    """One machine in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        url: str,
        token: str,
        ca_file: Path | None = None,
        options: tuple[str, ...] = (),
        *,
        forked: bool = True,
    ) -> None:
        """`options`: of `makara join`, beside those that every test needs. `forked`: as for
        `ServiceProcess`."""
        self.folder = folder
        folder.mkdir()
        self._url = url
        self.options = options
        self._forked = forked
        self._trust = ["--ca-file", str(ca_file)] if ca_file is not None else []
        self._token_file = folder / "join.token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(f"{token}\n")
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> None:
        join = ["join", self._url, "--name", self.folder.name, *self._trust, *self.options]
        join += ["--token-file", str(self._token_file), "--folder", str(self.folder / "machine")]
        log, environment = self.folder / "join.log", {**os.environ, "OMP_NUM_THREADS": "1"}
        if self._forked:
            self._process = Forked(cli.main, join, log=log, environment=environment)
            return
        command = [sys.executable, "-m", "makara.manager.cli", *join]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

    def kill(self, *, with_vm: bool = True) -> None:
        """SIGKILL to `makara join`; and to all that its VM is, as when the machine loses its power."""
        assert self._process is not None
        victims = self.vm_processes() if with_vm else []
        for process in [psutil.Process(self._process.pid), *victims]:
            process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int | None:
        """Until it ends by itself; its exit status."""
        assert self._process is not None
        return self._process.wait(timeout=300)

    def signal(self, number: int) -> None:
        """To `makara join` alone, without waiting for what it does."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Have it end at once, with its VM, and wait for that: a second signal cuts its hand-over short."""
        if self._process is not None and self._process.poll() is None:
            for _ in range(2):
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=1)
            self._process.wait()

    def vm_processes(self) -> list[psutil.Process]:
        """The agent and the trainers on it."""
        where = f"{self.folder}/machine/vms/"
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(part.startswith(where) for part in process.info["cmdline"] or ())
        ]

    def vms(self) -> list[str]:
        """The names of the folders of its VMs."""
        return sorted(path.name for path in (self.folder / "machine" / "vms").glob("*"))

    def log(self) -> str:
        agent = [path.read_text() for path in self.folder.glob("machine/vms/*/agent.log")]
        return "\n".join([(self.folder / "join.log").read_text(), *agent])
