"""A real manager process on loopback, with scripted agents as its VMs."""

from __future__ import annotations

import io
import json
import os
import signal
import ssl
import sys
import tarfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from forked import Forked
from makara.manager.cli.client import Client, Unreachable
from makara.manager.config import ServerConfig
from makara.manager.server import serve
from s3_server import free_ports
from trainer_processes import CONTEXT

AGENT = Path(__file__).with_name("scripted_agent.py")


class Manager:
    """Use: `start()`, then `client` and `http`; `kill()` is SIGKILL; the VMs of `home` live on."""

    def __init__(
        self,
        home: Path,
        *stores: str,
        tls: bool = False,
        run: Callable[..., None] | None = None,
        arguments: tuple[object, ...] = (),
    ) -> None:
        """`stores`: those that the administrator allows; none: the defaults. `run`: what its process does, by
        default `serve`; called with its settings, where it says that it is ready, and `arguments`."""
        self.run, self.arguments = run or _serve, arguments
        self.home = home
        self.tls = tls
        self.stores = stores
        self.process: Forked | None = None

    def start(self) -> Manager:
        agent = (sys.executable, str(AGENT))
        stores = self.stores or None
        config = ServerConfig(
            home=self.home,
            port=port_for(self.home),
            agent_command=agent,
            tick_s=0.05,
            allow_stores=stores,
            tls=self.tls,
        )
        log = Path(f"{self.home}.log")
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self.process = Forked(self.run, config, theirs, *self.arguments, log=log, environment=os.environ)
        theirs.close()
        with ours:
            try:
                self.url, self.token = ours.recv()  # its port listens from now on
            except EOFError:
                raise AssertionError(log.read_text()) from None
        ca_file = self.home / "ca.pem" if self.tls else None
        self.client = Client(self.url, self.token, ca_file)
        trust = ssl.create_default_context(cafile=ca_file) if self.tls else True
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=300, verify=trust)
        return self

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def submit(
        self, store: Path, key: str | None = None, token: str | None = None, **changes: dict[str, Any]
    ) -> httpx.Response:
        return self.post_job(json.dumps(job_spec(store, **changes)), key=key, token=token)

    def post_job(
        self,
        spec: str,
        *,
        bundle: bytes | None = None,
        key: str | None = None,
        secrets: str = "{}",
        token: str | None = None,
    ) -> httpx.Response:
        """Submit as the holder of `token`; None: as the administrator."""
        headers = {"Authorization": f"Bearer {token or self.token}"} | (
            {"Idempotency-Key": key} if key else {}
        )
        files = {"bundle": ("bundle.tar.gz", BUNDLE if bundle is None else bundle, "application/gzip")}
        return self.http.post(
            "/api/v1/jobs", data={"spec": spec, "secrets": secrets}, files=files, headers=headers
        )

    def wait(self, job: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The job's view once `condition` holds of it; fails if the job ends before."""
        while True:
            with self.client.stream(f"/jobs/{job}/stream") as events:
                for event, data in events:
                    if event != "status":
                        continue
                    if condition(data):
                        return data
                    assert data["status"] not in ("finished", "stopped", "failed"), data
            assert self.process is not None
            if self.process.poll() is not None:
                raise Unreachable("the manager has ended")

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.client.close()
            self.http.close()
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


def port_for(home: Path) -> int:
    """Of the next manager of `home`: its last one, which 0 asks for, or a free one.

    No system gives that one to connections by itself, so that it is free when the manager starts again.
    """
    return 0 if (home / "server.json").exists() else free_ports(1)[0]


def _serve(config: ServerConfig, ready: Connection) -> None:
    serve(config, on_ready=lambda url, token: ready.send((url, token)))


def job_spec(store: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A valid submission of two VMs; `changes` are merged into its sections."""
    value: dict[str, Any] = {
        "name": "scripted",
        "entrypoint": "train:build",
        "resources": {"provider": "local", "min_nodes": 1, "max_nodes": 2},
        "training": {"global_batch_size": 4, "steps": 20},
        "checkpoint": {"uri": store.as_uri(), "interval": 10},
    }
    for section, fields in changes.items():
        value[section] = {**value.get(section, {}), **fields}
    return value


def archive(files: dict[str, bytes] | None = None) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, data in (files or {"train.py": b"pass\n"}).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return raw.getvalue()


BUNDLE = archive()


def release_all(home: Path) -> None:
    """End every VM that a test left."""
    from makara.manager.providers.local import LocalProvider

    provider = LocalProvider(home / "vms")
    for resource in provider.list():
        provider.release(resource.vm)
    provider.close()
