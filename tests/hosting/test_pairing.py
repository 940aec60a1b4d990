"""How `makara up` and its VM know each other, and what strangers come to. The VM's side is the program of its
user data, as a process."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import select
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from makara.manager.authority import Authority
from makara.manager.hosting import installing, pairing
from makara.manager.hosting.pairing import NobodyThere, NotOurs, Taken, pair
from makara.manager.hosting.record import VmRecord
from makara.manager.hosting.user_data import user_data
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import VmEnding
from manager_vm import ManagerVm
from metadata import AzureMetadata, serving
from s3_server import free_ports
from service_process import wait_for

PAYLOAD = b"no zip file"
SECRET = "by which they know each other"
TOLD = {"url": "https://127.0.0.1:1", "names": ["127.0.0.1"]}


def record_of(port: int) -> VmRecord:
    return VmRecord(
        cloud="aws",
        identity="a",
        attempt=Attempt(vm="manager", placement=Placement(provider="aws")),
        asked_at=0.0,
        secret=SECRET,
        payload_sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        port=port,
    )


class Waiting:
    """A VM that waits for who asked for it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        (self.port,) = free_ports(1)
        data = user_data(record_of(self.port), VmEnding(kind="power_off"))
        self.vm = ManagerVm(folder, data, **changes)
        self.trusted: list[str] = []

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def pair(self, secret: str = SECRET, payload: bytes = PAYLOAD, port: int | None = None) -> None:
        pair("127.0.0.1", port or self.port, secret, payload, TOLD, self.trusted.append)

    @property
    def taken(self) -> bytes | None:
        file = self.vm.boot / "payload.zip"
        return file.read_bytes() if (self.vm.boot / "paired").exists() else None


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    made = Waiting(tmp_path / "vm")
    try:
        wait_for(made.listens, "the VM to listen", lambda: made.vm.console)
        yield made
    finally:
        made.vm.close()


def test_who_knows_the_secret_hands_over_the_payload_and_learns_whom_to_trust(waiting: Waiting) -> None:
    waiting.pair()
    assert waiting.taken == PAYLOAD
    assert json.loads((waiting.vm.boot / "told.json").read_text()) == TOLD
    (ca,) = waiting.trusted
    assert ca.split() == (waiting.vm.boot / "ca.pem").read_text().split()


def test_the_vms_authority_is_one_that_a_manager_takes(waiting: Waiting, tmp_path: Path) -> None:
    authority = Authority(waiting.vm.boot, ["127.0.0.1"])
    made = x509.load_pem_x509_certificate(authority.certificate.encode())
    assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert oct((waiting.vm.boot / "ca.key").stat().st_mode & 0o777) == "0o600"
    now = datetime.now(UTC)
    assert made.not_valid_before_utc < now - timedelta(hours=23)  # other machines' clocks may be behind
    assert made.not_valid_after_utc > now + timedelta(days=7000)
    assert ssl.create_default_context(cadata=authority.certificate).get_ca_certs()


def test_who_does_not_know_the_secret_is_sent_nothing_and_sends_nothing(waiting: Waiting) -> None:
    with pytest.raises(NotOurs, match="not the VM that was asked for"):
        waiting.pair(secret="another")
    assert waiting.trusted == []
    assert waiting.taken is None
    waiting.pair()  # and nothing is spoilt by it
    assert waiting.taken == PAYLOAD


def test_another_payload_than_the_user_data_names_is_not_taken(waiting: Waiting) -> None:
    with pytest.raises((NotOurs, NobodyThere)):
        waiting.pair(payload=b"another")
    assert waiting.taken is None


def test_the_second_comes_too_late(waiting: Waiting) -> None:
    waiting.pair()
    with pytest.raises((Taken, NobodyThere)):
        waiting.pair()
    assert waiting.taken == PAYLOAD


def test_of_two_at_once_one_hands_over(waiting: Waiting) -> None:
    outcomes: list[str] = []

    def come() -> None:
        try:
            waiting.pair()
            outcomes.append("taken")
        except (Taken, NobodyThere) as error:
            outcomes.append(type(error).__name__)

    coming = [threading.Thread(target=come) for _ in range(4)]
    for one in coming:
        one.start()
    for one in coming:
        one.join()
    assert outcomes.count("taken") == 1
    assert waiting.taken == PAYLOAD


def test_nobody_can_stand_between(waiting: Waiting, tmp_path: Path) -> None:
    """With a certificate of their own, passing on whatever each side says."""
    with between(waiting.port, tmp_path / "between") as port, pytest.raises(NotOurs):
        waiting.pair(port=port)
    assert waiting.taken is None


def test_who_is_silent_keeps_nobody(waiting: Waiting) -> None:
    with socket.create_connection(("127.0.0.1", waiting.port)):
        waiting.pair()
    assert waiting.taken == PAYLOAD


def test_many_who_are_silent_keep_nobody(waiting: Waiting) -> None:
    """More than are heard at once: the oldest of them make room."""
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", waiting.port)))
        waiting.pair()
    assert waiting.taken == PAYLOAD


def test_strangers_who_greet_keep_nobody_either(waiting: Waiting) -> None:
    """As many as would push out each nonce that was given before theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stranger = http.client.HTTPSConnection("127.0.0.1", waiting.port, context=context)
    meet = pairing._meet

    def between(*arguments: Any) -> str:
        nonce = meet(*arguments)
        for _ in range(100):
            stranger.request("POST", "/hello", b"00")
            stranger.getresponse().read()
        return nonce

    with pytest.MonkeyPatch.context() as patch, contextlib.closing(stranger):
        patch.setattr(pairing, "_meet", between)
        waiting.pair()
    assert waiting.taken == PAYLOAD


def test_a_vm_that_nobody_comes_to_ends_itself(tmp_path: Path) -> None:
    late = Waiting(tmp_path / "vm", pair_within_s=0.5)
    try:
        assert late.vm.wait() == 0
        assert late.vm.ended
        with pytest.raises(NobodyThere):
            late.pair()
        assert late.taken is None
    finally:
        late.vm.close()


def test_a_vm_whose_installation_fails_in_any_way_ends_itself(waiting: Waiting) -> None:
    waiting.pair()  # what is no zip file
    waiting.vm.wait()
    assert waiting.vm.ended


def test_on_azure_it_has_itself_deleted(tmp_path: Path) -> None:
    """By the program, and by the timer that calls the same; shut down alone, it would be billed on."""
    metadata = AzureMetadata(identity_id="manager")
    with serving(metadata):
        address = metadata.url
        ending = VmEnding(kind="azure", metadata_url=address, management_url=address, identity_id="manager")
        late = Waiting(tmp_path / "vm", pair_within_s=0.5, ending=ending.model_dump())
        try:
            wait_for(lambda: metadata.deleted, "the VM to be deleted", lambda: late.vm.console)
            metadata.deleted.clear()
            timer = subprocess.Popen(
                [
                    *(sys.executable, "-I", str(late.vm.boot / "end_vm.py")),
                    *(str(late.vm.boot / "boot.json"), "600"),
                ]
            )
            try:
                wait_for(lambda: metadata.deleted, "the VM to be deleted again", lambda: late.vm.console)
            finally:
                timer.kill()
                timer.wait()
        finally:
            late.vm.close()


def test_a_manager_that_runs_is_not_ended_for_want_of_a_mark(tmp_path: Path) -> None:
    """Its disk takes no more when all is done: the mark says nothing that its VM has to end for."""
    payload = payload_that_installs("def main(folder, root): print('a manager answers', flush=True)")
    made = Waiting(tmp_path / "vm", payload_sha256=hashlib.sha256(payload).hexdigest())
    try:
        (made.vm.boot / "installed.new").mkdir()  # so that root cannot write it either
        wait_for(made.listens, "the VM to listen", lambda: made.vm.console)
        made.pair(payload=payload)
        assert made.vm.wait() == 0, made.vm.console
        assert not (made.vm.boot / "installed").exists()
        assert not made.vm.ended
        assert (made.vm.root / "disabled").read_text().split() == ["makara-manager-boot.service"]
        assert made.vm.console.count("a manager answers") == 1  # nor is it installed again
        assert "/installed: " in made.vm.console
    finally:
        made.vm.close()


def payload_that_installs(code: str) -> bytes:
    """By a wheel that has this program alone as `installing`."""
    wheel, payload = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for folder in ("", "manager/", "manager/boot/", "manager/hosting/"):
            archive.writestr(f"makara/{folder}__init__.py", "")
        archive.writestr("makara/manager/boot/first_boot.py", "")
        archive.writestr("makara/manager/hosting/installing.py", code)
    with zipfile.ZipFile(payload, "w") as archive:
        archive.writestr("makara-1-py3-none-any.whl", wheel.getvalue())
    return payload.getvalue()


def test_the_installer_waits_for_a_manager_that_answers(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(SystemExit, match="the manager does not answer"):
        installing.await_answer(port, Authority(tmp_path, []).certificate, within_s=0.5)


def test_a_venv_is_made_beside_the_one_that_is_used(tmp_path: Path) -> None:
    first = installing.make_room(tmp_path)
    first.mkdir()
    installing.switch(tmp_path / "opt/makara", first)
    (tmp_path / "opt/makara-venvs/unfinished").mkdir()
    second = installing.make_room(tmp_path)
    assert [one.name for one in first.parent.iterdir()] == [first.name]
    second.mkdir()
    installing.switch(tmp_path / "opt/makara", second)
    assert (tmp_path / "opt/makara").resolve() == second


class between:
    """Listens, and passes on what comes over TLS, in one thread: no TLS connection bears two."""

    def __init__(self, port: int, folder: Path) -> None:
        folder.mkdir()
        self._own = Authority(folder, ["127.0.0.1"]).context
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> int:
        threading.Thread(target=self._serve, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
        connection, _ = self._listener.accept()
        with (
            self._own.wrap_socket(connection, server_side=True) as caller,
            socket.create_connection(("127.0.0.1", self._port)) as onward,
            theirs.wrap_socket(onward) as vm,
        ):
            _pass_on({caller: vm, vm: caller})


def _pass_on(onward: dict[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    """Until either hangs up."""
    for connection in onward:
        connection.setblocking(False)
    while True:
        readable, _, _ = select.select(list(onward), [], [])
        for connection in readable:
            try:
                data = connection.recv(1 << 16)
                onward[connection].sendall(data)
            except ssl.SSLWantReadError:  # a session ticket, say
                continue
            except OSError:
                return
            if not data:
                return
