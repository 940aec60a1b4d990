"""`makara up` to its end: a VM of the stand-in boots as a process on loopback, by the user data that the
cloud was given, takes this Makara, and runs a manager that takes jobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Home
from makara.manager.cli import main as cli
from makara.manager.cli.client import Client, RequestRefused
from makara.manager.hosting import launching
from makara.manager.hosting.pairing import pair
from makara.manager.service.tokens import identity_in
from manager_vm import ManagerVm
from managers import BUNDLE, job_spec
from rented_vms import cloud_of
from s3_server import S3Server, free_ports
from service_process import wait_for

LOOPBACK = "127.0.0.1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for name in ("MAKARA_SERVER", "MAKARA_TOKEN", "MAKARA_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    (port,) = free_ports(1)
    with cloud_of("aws", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch, port=port)
        monkeypatch.setattr(launching, "pair", pair)
        monkeypatch.setattr(launching, "addresses", lambda there: (LOOPBACK, LOOPBACK) if there else ("", ""))
        yield home


class Booting:
    """The VM comes up once it has been asked for."""

    def __init__(self, home: Home, folder: Path) -> None:
        self._home, self._folder = home, folder
        self.vm: ManagerVm | None = None
        self._thread = threading.Thread(target=self._boot, daemon=True)
        self._thread.start()

    def _boot(self) -> None:
        wait_for(lambda: self._home.cloud.user_data(), "a VM to be asked for", lambda: "")
        self.vm = ManagerVm(self._folder, self._home.cloud.user_data()[0])

    @property
    def console(self) -> str:
        return self.vm.console if self.vm is not None else "no VM was asked for"

    def close(self) -> None:
        self._thread.join()
        if self.vm is not None:
            print(self.vm.console)
            self.vm.close()


def submit(client: Client, store: S3Server, provider: str = "static") -> str:
    """A job for which no machine has joined."""
    checkpoint = {"uri": store.uri("up"), "endpoint": store.endpoint}
    spec: dict[str, Any] = job_spec(Path("/"), checkpoint=checkpoint, resources={"provider": provider})
    keys = {name: store.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    spec["secrets"] = sorted(keys)
    files = {"bundle": ("bundle.tar.gz", BUNDLE, "application/gzip")}
    data = {"spec": json.dumps(spec), "secrets": json.dumps(keys)}
    return str(client.post("/jobs", data=data, files=files)["job"])


def test_a_manager_comes_up_takes_jobs_of_its_owner_and_goes(
    home: Home, tmp_path: Path, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    booting = Booting(home, tmp_path / "vm")
    try:
        assert home.up(real=True) == 0, booting.console
        url = capsys.readouterr().out.strip()
        assert url == f"https://{LOOPBACK}:{home.record.port}"
        assert booting.vm is not None
        assert booting.vm.wait() == 0
        assert (booting.vm.boot / "installed").exists()
        assert (booting.vm.root / "disabled").read_text().split() == ["makara-manager-boot.service"]
        (library,) = (booting.vm.root / "opt/makara/lib").glob("python3*/site-packages/makara")
        assert (library / "manager/page/index.html").exists()
        assert identity_in(booting.vm.root / "var/lib/makara/tokens.sqlite3") == home.record.identity

        with Client(url, home.folder.token, home.folder.path / "ca.pem") as client:
            job = submit(client, s3_server)
            with pytest.raises(RequestRefused, match="faults") as refused:
                submit(client, s3_server, provider="local")  # its code would have the manager's rights
            assert "this manager has no provider local" in refused.value.errors[0][1]
            tokens = client.get("/tokens")["tokens"]
            assert "owner" in {token["name"] for token in tokens}
        for place in (home.path, home.folder.path):  # the command line finds it by itself
            assert cli.main(["ps", "--home", str(place)]) == 0
            assert job in capsys.readouterr().out
        with (
            Client(url, "another.token", home.folder.path / "ca.pem") as stranger,
            pytest.raises(RequestRefused),
        ):
            stranger.get("/jobs")

        assert home.up() == 0  # it is up already
        assert capsys.readouterr().out.strip() == url
        assert home.cloud.num_asked() == 1
        secret = home.folder.token.partition(".")[2]
        assert secret not in booting.vm.console
        assert all(secret not in text for text in _texts(booting.vm.root))
        assert home.down() == 0
        assert home.cloud.billed() == []
        assert cli.main(["ps", "--home", str(home.path)]) == 3
    finally:
        booting.close()


def _texts(root: Path) -> Iterator[str]:
    """Of whatever lies on the VM's disk, its image apart."""
    for folder in ("boot", "etc", "var"):
        for path in (root / folder).rglob("*"):
            if path.is_file():
                yield path.read_bytes().decode("latin-1")


def test_a_call_that_was_cut_off_after_the_vm_had_its_payload_finds_the_manager(
    home: Home, tmp_path: Path
) -> None:
    booting = Booting(home, tmp_path / "vm")
    try:
        home.up(cut_off="is_up", real=True)
        assert home.folder.url is None
        assert home.up(real=True) == 0, booting.console
        assert home.cloud.num_asked() == 2
        assert len(set(home.cloud.user_data())) == 1
    finally:
        booting.close()
