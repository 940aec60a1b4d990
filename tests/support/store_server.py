"""A store's server in a process of its own: started, paused and stopped as often as a test wants."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 30.0


class StoreServer(ABC):
    """Over `folder`, where it runs; `ready` is in the line that it prints once it answers.

    `pause` leaves requests without an answer, until `go_on`.
    """

    ready: str

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._log: deque[str] = deque(maxlen=200)

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _own_environment(self) -> Mapping[str, str]: ...

    @abstractmethod
    def _make_room(self) -> None:
        """Have the bucket or container that tests use exist."""

    def start(self) -> None:
        """Serve, and return when requests are answered and there is room for objects."""
        assert self._process is None, "already started"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            self._command(),
            cwd=self._folder,
            env={**os.environ, **self._own_environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        threading.Thread(target=self._follow, args=(self._process, ready), daemon=True).start()
        if not ready.wait(_START_LIMIT_S) or self._process.poll() is not None:
            self.stop(kill=True)
            raise RuntimeError(f"{type(self).__name__} did not start:\n" + "\n".join(self._log))
        self._make_room()

    def stop(self, *, kill: bool = False) -> None:
        """End the server: in good order, then it keeps what it holds; or as if its machine had failed."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pause(self) -> None:
        assert self._process is not None, "it serves"
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None, "it serves"
        self._process.send_signal(signal.SIGCONT)

    def _follow(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        """Keep the last lines of the server's output, for the message if it does not start."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._log.append(line.rstrip())
                if self.ready in line:
                    ready.set()
        ready.set()  # it ended: no use in waiting on
