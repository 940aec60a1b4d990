"""Secrets of every kind are planted, jobs run on them, and all that the run shows and leaves is searched."""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import httpx
import models
import psutil
import pytest
from joined_machine import JoinedMachine
from makara.manager.service.vms.renting import JOIN_TTL_S
from makara.protocol.messages import BootConfig
from planted import Plants, Watch, files_below
from rented_vms import RentingManager, cloud_of
from s3_server import S3Server
from service_process import ServiceProcess
from web_sockets import web_socket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection
from written_files import files_in

pytestmark = pytest.mark.slow

STEPS = 10_000  # more than the test waits for
STREAM_S = 2.0  # of what a job's page is sent for as long as somebody looks
ENTITLED = {
    # In the manager's home; all of it is for the user of the manager alone.
    "admin.token": {"admin token"},
    "ca.key": {"authority's key"},
    "tls.pem": {"certificate's key"},
    "join.secret": {"join secret"},
    "generations.secret": {"generations' secret"},
    "secrets.json": {"environment secret", "store key"},
    "machines.sqlite3": {"join token"},  # in a boot file, for a machine that has it still to come
    # On a VM.
    "boot.json": {"join token"},
    "worker.token": {"worker token"},
    # A person's own machine.
    "join.token": {"machine token"},
}
"""Which files hold which secrets, by name. No other file holds any."""


class KeyedServer(S3Server):
    """With a key of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.secret_key = secrets.token_urlsafe(30)

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def objects(self) -> dict[str, bytes]:
        keys = {"aws_access_key_id": self.environment["AWS_ACCESS_KEY_ID"]}
        keys["aws_secret_access_key"] = self.secret_key
        config = botocore.config.Config(proxies={}, s3={"addressing_style": "path"})
        client = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=self.region, config=config, **keys
        )
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        found: dict[str, bytes] = {}
        for name in names:
            with suppress(client.exceptions.NoSuchKey):  # the manager tidies up meanwhile
                found[name] = client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        client.close()
        assert any(name.endswith(".safetensors") for name in found)
        return found


class Run:
    """A manager over TLS, a person's machine, a local VM, and a store with keys of the job's own."""

    def __init__(self, folder: Path) -> None:
        self.plants = Plants()
        self.store = KeyedServer(folder / "s3")
        self.secret = secrets.token_urlsafe(30) + '"\\+/='
        self.cloud = {
            name: secrets.token_urlsafe(30) for name in ("AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET")
        }
        environment = {**self.cloud, "AWS_ACCESS_KEY_ID": "the-manager"}
        self.service = ServiceProcess(folder / "manager", environment, options=("--tls",), forked=False)
        self.answers: dict[str, bytes] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _start(self) -> None:
        self._opened.callback(self.store.stop)
        self.store.start()
        self._opened.callback(self.service.close)
        self.service.start()
        admin = (self.service.home / "admin.token").read_text().strip()
        self.admin = {"Authorization": f"Bearer {admin}"}
        token = self._token({"name": "lab", "scope": "machine", "uses": 1}, "machine token")
        self.user = self._token({"name": "ada"}, "user token")
        url, ca_file = self.service.client.url, self.service.home / "ca.pem"
        trust = ssl.create_default_context(cafile=ca_file)
        self.http = httpx.Client(base_url=url, verify=trust, trust_env=False, timeout=300)
        self.machine = JoinedMachine(self.service.folder / "lab", url, token, ca_file, forked=False)
        self.machine.start()
        self._opened.callback(self.machine.stop)
        self._opened.callback(self.http.close)
        self.folders = (self.service.home, self.machine.folder)

    def submit(self, provider: str) -> str:
        keys = {name: self.store.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        return self.service.submit(
            Path(models.__file__).read_text(),
            secrets={**keys, "WANDB_API_KEY": self.secret},
            entrypoint="train:slowest_gpt",
            training={"global_batch_size": 8, "seed": 7, "steps": STEPS},
            parallelism={"microbatch_size": 2, "num_sections": 8},
            resources={"provider": provider, "max_nodes": 1},
            checkpoint={
                "uri": self.store.uri(provider),
                "endpoint": self.store.endpoint,
                "region": self.store.region,
                "interval": 10,
            },
        )

    def _token(self, request: dict[str, Any], what: str) -> str:
        token = self.service.client.post("/tokens", json=request)["token"]
        self.plants.add(what, token.partition(".")[2])
        return token

    # ---- what is shown -------------------------------------------------------------------------------------

    def walk(self, job: str) -> None:
        """Ask for everything that the API describes, as the administrator, and keep the answers."""
        paths = self.http.get("/openapi.json").json()["paths"]
        vms = [vm["vm"] for vm in self.service.job(job)["vms"]]
        fields = {"job": job, "vm": vms[0], "part": "torch", "machine": "m", "token_id": "t"}
        for path in [path for path, methods in paths.items() if "get" in methods]:
            for vm in vms if path.endswith("/logs") else [""]:
                self._get(path.format(**fields), vm)

    def _get(self, path: str, vm: str) -> None:
        parameters = {"vm": vm} if vm else {}
        data = b""
        enough = time.monotonic() + STREAM_S
        bound = httpx.Timeout(300.0, read=STREAM_S if path.endswith("/stream") else 300.0)
        with self.http.stream("GET", path, headers=self.admin, params=parameters, timeout=bound) as answer:
            try:
                for part in answer.iter_bytes():
                    data += part
                    if path.endswith("/stream") and time.monotonic() > enough:
                        break
            except httpx.ReadTimeout:
                assert path.endswith("/stream"), path
        self.answers[f"{path} {vm}"] = (
            self.answers.get(f"{path} {vm}", b"") + repr(answer.headers).encode() + data
        )

    def visit(self) -> None:
        """Sign in as the page does, and keep what a browser is sent; its own cookie is for it."""
        answer = self.http.post("/login", data={"token": self.user})
        assert answer.status_code == 200
        self.plants.add("session", str(self.http.cookies["makara_session"]).partition(".")[2])
        self.answers["/login"] = answer.content
        for path in ("/", "/docs", "/session", "/page/app.js", "/page/job.js", "/api/v1/jobs"):
            self.answers[f"{path} by cookie"] = self.http.get(path).content
        self.http.cookies.clear()

    def blunder(self, job: str) -> None:
        """Send secrets where they do not belong, and keep the answers."""
        spec = {"name": "other", "secrets": ["WANDB_API_KEY"], "entrypoint": "train:build"}
        for number, values in enumerate(
            ({"WANDB_API_KEY": [self.secret]}, {"OTHER": self.secret}, self.secret)
        ):
            form = {"spec": json.dumps(spec), "secrets": json.dumps(values)}
            answer = self.http.post(
                "/api/v1/jobs", data=form, files={"bundle": ("b.tar.gz", b"no archive")}, headers=self.admin
            )
            assert answer.status_code == 422
            self.answers[f"blunder {number} {job}"] = answer.content
        body = {"secrets": {"WANDB_API_KEY": self.secret}, "and": self.secret}
        answer = self.http.post(f"/api/v1/jobs/{job}/resume", json=body, headers=self.admin)
        self.answers[f"blunder resume {job}"] = answer.content
        for path in ("/api/v1/jobs", f"/api/v1/jobs/{job}/secrets", f"/api/v1/jobs/{job}/boot/wheel"):
            answer = self.http.get(path, headers={"Authorization": f"Bearer x{self.user}"})
            assert answer.status_code in (401, 403)
            self.answers[f"blunder {path}"] = answer.content

    # ---- what there is to be found -------------------------------------------------------------------------

    def plant(self, watch: Watch) -> None:
        """Take note of all secrets that the run made."""
        self.plants.add("environment secret", self.secret)
        self.plants.add("store key", self.store.secret_key)
        for name, value in self.cloud.items():
            self.plants.add(f"the manager's {name}", value)
        home = self.service.home
        self.plants.add("admin token", (home / "admin.token").read_text().strip().partition(".")[2])
        self.plants.add("join secret", (home / "join.secret").read_bytes())
        self.plants.add("generations' secret", (home / "generations.secret").read_bytes())
        self.plants.add("authority's key", _key_in((home / "ca.key").read_text()))
        self.plants.add("certificate's key", _key_in((home / "tls.pem").read_text()))
        for path, texts in watch.texts.items():
            for text in texts:
                if path.name == "boot.json" and text.endswith(b"}"):
                    self.plants.add("join token", json.loads(text)["join_token"].partition(".")[2])
                elif path.name == "worker.token" and text:
                    self.plants.add("worker token", text.decode().strip().partition(".")[2])


def _key_in(pem: str) -> str:
    """The first line of the private key."""
    return pem.partition("PRIVATE KEY-----\n")[2].splitlines()[0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as made:
        yield made


def environment_of(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


def test_no_secret_is_where_somebody_else_could_read_it(run: Run) -> None:
    service = run.service
    with Watch(*run.folders, service.folder) as watch:
        jobs: list[str] = []
        for provider in ("local", "static"):
            jobs.append(run.submit(provider))
            service.wait_step(jobs[-1], 1)
        trainers = [p for p in service.vm_processes() + run.machine.vm_processes() if _trains(p)]
        environments = [environment_of(trainer) for trainer in trainers]
        modes = {stat.S_IMODE(os.stat(f"/proc/{trainer.pid}/environ").st_mode) for trainer in trainers}
        for job in jobs:
            run.walk(job)
            run.blunder(job)
        run.visit()
        watch.look()
        open_to_others = {
            path for path in files_below(run.folders) if stat.S_IMODE(path.stat().st_mode) & 0o077
        }
        service.kill_vm(service.live(jobs[0])[0])  # another has to join: new tokens, and the words of a loss
        service.kill()
        service.start()
        service.wait(jobs[0], lambda view: view["status"] == "running" and len(view["vms"]) > 1, "another VM")
        for job in jobs:
            service.client.post(f"/jobs/{job}/stop")
            service.wait_status(job, "stopped")
            run.walk(job)
    run.plant(watch)
    plants = run.plants
    assert len(plants.kinds) == 14, plants.kinds

    # The plants were live: trainers had what is theirs, and the search finds them there.
    assert len(trainers) == 2
    assert all({"environment secret", "store key"} <= plants.among(each) for each in environments)
    assert modes == {0o400}

    assert plants.found(run.answers) == set()
    assert plants.among(b"\n".join(watch.commands)) == set()
    assert plants.found(run.store.objects()) == set()
    held: dict[str, set[str]] = {}
    for path, texts in watch.texts.items():
        found = set[str]().union(*map(plants.among, texts))
        if found:
            held.setdefault(_name(path), set()).update(found)
            assert path not in open_to_others, path
    assert held == ENTITLED


def _name(path: Path) -> str:
    """Of the file for which this one is written, or to which it belongs."""
    name = path.name.removesuffix(".new").removesuffix("-wal")
    return re.sub(r"^\.(.+)\.[0-9a-f]{32}$", r"\1", name)


def _trains(process: psutil.Process) -> bool:
    return "makara.worker.trainer" in process.cmdline()


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_user_data_holds_one_secret_which_is_of_no_use_once_its_vm_has_joined(
    name: str, tmp_path: Path
) -> None:
    plants, secret = Plants(), secrets.token_urlsafe(30)
    with cloud_of(name, tmp_path) as cloud, ExitStack() as opened:
        if name == "aws":
            cloud.environment = {**cloud.environment, "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30)}
        for variable, value in cloud.environment.items():
            if variable in ("AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET"):
                plants.add("the cloud's", value)
        manager = RentingManager(tmp_path / "manager", cloud)
        opened.callback(manager.close)
        manager.service.start()
        home = manager.service.home
        training = {"global_batch_size": 4, "steps": 20}
        resources = {**cloud.resources, "min_nodes": 2, "max_nodes": 2}
        manager.service.submit("pass\n", {"KEY": secret}, resources=resources, training=training)
        plants.add("environment secret", secret)
        for file, what in (("admin.token", "admin token"), ("ca.key", "authority's key")):
            plants.add(what, (home / file).read_text().strip().splitlines()[-2 if "key" in file else 0])
        for file in ("join.secret", "generations.secret"):
            plants.add(file, (home / file).read_bytes())
        data = manager.await_user_data(cloud, 0)
        boot = manager.boot(data)
        plants.add("join token", boot.join_token.partition(".")[2])
        shown = data + "".join(files_in(data).values()).encode()
        assert plants.among(shown) == {"join token"}
        manager.await_user_data(cloud, 1)  # the second is rented once the first has joined
        token = worker_token(manager, boot)
        assert manager.fetch(f"jobs/{boot.job}/secrets", token).json() == {"KEY": secret}
        assert "has been used" in refusal(manager, boot)
        with closing(sqlite3.connect(home / "tokens.sqlite3")) as tokens, tokens:
            lives = tokens.execute("SELECT created, expires FROM tokens WHERE scope = 'join'").fetchall()
            # It counts from when the VM is asked for, which may wait for its turn.
            assert all(created < expires <= time.time() + JOIN_TTL_S for created, expires in lives)
            tokens.execute("UPDATE tokens SET expires = created WHERE scope = 'join' AND used = 0")
        late = manager.boot_file(manager.await_user_data(cloud, 1))
        assert "has expired" in refusal(manager, late)


def connecting(manager: RentingManager, boot: BootConfig) -> ClientConnection:
    """To the manager, as this VM with its join token."""
    headers = {"Authorization": f"Bearer {boot.join_token}"}
    return web_socket(manager.service.client.url, f"/api/v1/agents/{boot.vm}", headers, manager.trust)


def worker_token(manager: RentingManager, boot: BootConfig) -> str:
    """What the VM gets in return for its join token."""
    with connecting(manager, boot) as connection:
        for frame in connection:
            if (message := json.loads(frame))["type"] == "token":
                return message["token"]
    raise AssertionError("it got none")


def refusal(manager: RentingManager, boot: BootConfig) -> str:
    """What the manager says to who shows this VM's join token."""
    with pytest.raises(InvalidStatus) as refused:
        connecting(manager, boot)
    assert refused.value.response.status_code == 403
    assert manager.fetch(f"jobs/{boot.job}/boot/wheel", boot.join_token).status_code == 401
    return refused.value.response.body.decode()
