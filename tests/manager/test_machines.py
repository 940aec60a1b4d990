"""Machines that ask a manager to let them in: who is, who is not, and what the command line says of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joined_machine import JoinedMachine
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.main import main
from makara.manager.service.tokens import Scope, TokenRefused, TokenStore
from makara.protocol.machines import JOIN_HEADER, SCHEME, Challenge
from service_process import ServiceProcess, wait_for
from web_sockets import web_socket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path_factory.mktemp("manager"))
    process.start()
    yield process
    process.close()


@pytest.fixture
def machines(service: ServiceProcess, tmp_path: Path) -> Iterator[list[JoinedMachine]]:
    """Two, not started, with a token for one."""
    token = new_token(service, 1)
    made = [JoinedMachine(tmp_path / f"lab{n}", service.client.url, token) for n in range(2)]
    yield made
    for machine in made:
        machine.stop()


def new_token(service: ServiceProcess, uses: int) -> str:
    answer = service.client.post("/tokens", json={"name": "lab", "scope": "machine", "uses": uses})
    return answer["token"]


def connected(service: ServiceProcess) -> list[str]:
    found = service.client.get("/machines")["machines"]
    return [machine["name"] for machine in found if machine["connected"]]


def challenge(service: ServiceProcess) -> Challenge:
    return Challenge.model_validate_json(
        httpx.get(f"{service.client.url}/api/v1/machines/challenge", trust_env=False).content
    )


def signed(key: Ed25519PrivateKey, asked: Challenge, **changes: Any) -> str:
    signature = key.sign(asked.model_copy(update=changes).signed()).hex()
    return f"{SCHEME} {key.public_key().public_bytes_raw().hex()} {asked.nonce} {signature}"


def opened(service: ServiceProcess, authorization: str, token: str | None = None) -> ClientConnection:
    headers = {"Authorization": authorization, **({JOIN_HEADER: token} if token is not None else {})}
    return web_socket(service.client.url, "/api/v1/machines/connection", headers)


def refused(service: ServiceProcess, authorization: str, token: str | None = None) -> tuple[int, bytes]:
    with pytest.raises(InvalidStatus) as caught:
        opened(service, authorization, token)
    return caught.value.response.status_code, bytes(caught.value.response.body)


def test_a_token_lets_in_as_many_machines_as_it_says(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    first, second = machines
    first.start()
    wait_for(lambda: "lab0" in connected(service), "the first machine", first.log)
    second.start()
    assert second.wait() == 1
    assert "this token has let in 1 machine, and lets in no more" in second.log()
    first.stop()
    first.start()  # known by its key
    wait_for(lambda: "lab0" in connected(service), "the first machine again", first.log)


def test_a_key_and_a_folder_are_one_machines(service: ServiceProcess, machines: list[JoinedMachine]) -> None:
    machine, other = machines
    machine.start()
    wait_for(lambda: "lab0" in connected(service), "the machine", machine.log)
    key = machine.folder / "machine" / "machine.key"
    assert key.stat().st_mode & 0o077 == 0
    other.folder, folder = machine.folder, other.folder
    other.start()
    assert other.wait() == 1
    assert "is another machine's that runs" in other.log()
    other.folder = folder


def test_a_machine_signs_for_no_other_manager(
    service: ServiceProcess, machines: list[JoinedMachine], tmp_path: Path
) -> None:
    machine, _ = machines
    machine.start()
    wait_for(lambda: "lab0" in connected(service), "the machine", machine.log)
    machine.stop()
    (machine.folder / "machine" / "manager.id").write_text("another")
    machine.start()
    assert machine.wait() == 1
    assert "belongs to another manager" in machine.log()


def test_a_removed_machine_has_to_join_anew(service: ServiceProcess, machines: list[JoinedMachine]) -> None:
    machine, _ = machines
    machine.start()
    wait_for(lambda: "lab0" in connected(service), "the machine", machine.log)
    (known,) = [m for m in service.client.get("/machines")["machines"] if m["connected"] and m["name"]]
    service.client.delete(f"/machines/{known['machine']}")
    assert machine.wait() == 1
    assert "it needs a join token" in machine.log()
    with pytest.raises(RequestRefused, match="there is no"):
        service.client.delete(f"/machines/{known['machine']}")


def test_a_machine_that_is_removed_while_it_is_a_vm_leaves_nothing_of_it(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    """Found: `makara join` ended, and the agent and the job's folder with its boot file stayed."""
    machine, _ = machines
    machine.start()
    code = "import time\ntime.sleep(3600.0)\n"  # it does not fail before its machine is removed
    training = {"global_batch_size": 2, "steps": 1}
    job = service.submit(code, resources={"provider": "static"}, training=training)
    wait_for(lambda: bool(machine.vm_processes()), "the machine to be a VM", machine.log)
    (known,) = [m for m in service.client.get("/machines")["machines"] if m["vm"]]
    service.client.delete(f"/machines/{known['machine']}")
    assert machine.wait() == 1
    assert machine.vms() == []
    assert machine.vm_processes() == []
    service.client.post(f"/jobs/{job}/stop")
    service.wait_status(job, "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_machine_without_a_vm_goes_at_the_first_signal(
    service: ServiceProcess, machines: list[JoinedMachine], number: int
) -> None:
    machine, _ = machines
    machine.options = ("--grace", "3600")
    machine.start()
    wait_for(lambda: "lab0" in connected(service), "the machine", machine.log)
    machine.signal(number)
    assert machine.wait() == 0
    wait_for(lambda: "lab0" not in connected(service), "it to be away", machine.log)


def test_a_machine_that_never_reached_its_manager_goes_at_the_first_signal(tmp_path: Path) -> None:
    machine = JoinedMachine(tmp_path / "lab", "http://127.0.0.1:1", "a.b", options=("--grace", "3600"))
    machine.start()
    wait_for(lambda: "no connection to the manager" in machine.log(), "it to have tried", machine.log)
    machine.signal(signal.SIGTERM)
    assert machine.wait() == 0


def test_who_proves_nothing_is_not_let_in(service: ServiceProcess) -> None:
    key, other, token = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate(), new_token(service, 1)
    asked = challenge(service)
    public = key.public_key().public_bytes_raw().hex()
    by_other = other.sign(asked.signed()).hex()
    for authorization in (
        "",
        "Bearer x.y",
        f"{SCHEME} {public} {asked.nonce} {by_other}",
        f"{SCHEME} {public} {asked.nonce} nothex",
        signed(key, asked, manager="another"),
        signed(key, asked.model_copy(update={"nonce": "1000.aa.bb"})),
    ):
        assert refused(service, authorization, token)[0] == 401
    with opened(service, signed(key, asked), token) as connection:
        assert connection.recv()


def test_a_proof_that_was_overheard_is_good_for_nothing(service: ServiceProcess) -> None:
    key, token = Ed25519PrivateKey.generate(), new_token(service, 1)
    proof = signed(key, challenge(service))
    with opened(service, proof, token) as connection:
        assert connection.recv()
    assert refused(service, proof, token)[0] == 401


@pytest.mark.parametrize("kind", ["none", "unknown", "of a user", "revoked"])
def test_a_stranger_needs_a_join_token_that_is_good(service: ServiceProcess, kind: str) -> None:
    token = {"none": None, "unknown": "a.b"}.get(kind)
    if kind == "of a user":
        token = service.client.post("/tokens", json={"name": "ada"})["token"]
    elif kind == "revoked":
        token = new_token(service, 1)
        service.client.delete(f"/tokens/{token.partition('.')[0]}")
    status, body = refused(service, signed(Ed25519PrivateKey.generate(), challenge(service)), token)
    assert status == 403
    assert json.loads(body)["reason"]


def test_a_join_token_opens_nothing_else(service: ServiceProcess) -> None:
    headers = {"Authorization": f"Bearer {new_token(service, 1)}"}
    for path in ("jobs", "machines", "tokens"):
        answer = httpx.get(f"{service.client.url}/api/v1/{path}", headers=headers, trust_env=False)
        assert answer.status_code == 401


def test_a_report_that_cannot_be_read_closes_the_connection(service: ServiceProcess) -> None:
    key = Ed25519PrivateKey.generate()
    with opened(service, signed(key, challenge(service)), new_token(service, 1)) as connection:
        connection.recv()
        connection.send('{"obeyed": "many"}')
        with pytest.raises(ConnectionClosed, match="malformed report"):
            connection.recv()


@pytest.mark.parametrize(
    "body", [{"scope": "machine"}, {"scope": "user", "uses": 2}, {"scope": "machine", "uses": 0}]
)
def test_uses_are_of_join_tokens(service: ServiceProcess, body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        service.client.post("/tokens", json={"name": "x", **body})
    assert caught.value.status == 422


def test_machines_are_counted_once_each(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.sqlite3")
    token = store.issue(Scope.MACHINE, name="lab", uses=2)
    for machine in ("a", "b", "a"):
        store.spend(token, machine)
    with pytest.raises(TokenRefused, match="lets in no more"):
        store.spend(token, "c")
    ((grant, _, used),) = store.listed()
    assert (grant.uses, used) == (2, 2)
    store.revoke(grant.token_id)
    with pytest.raises(TokenRefused, match="unknown"):
        store.spend(token, "a")
    store.close()


_KNOWN = "a folder of a machine that has joined"
_KNOWN_MACHINE = ["join", "http://127.0.0.1:8700", "--folder", _KNOWN]

# ---- the command line --------------------------------------------------------------------------------------


def test_tokens_and_machines_are_listed(
    service: ServiceProcess,
    machines: list[JoinedMachine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    machine, _ = machines
    machine.start()
    wait_for(lambda: "lab0" in connected(service), "the machine", machine.log)
    home = ["--home", str(service.home)]
    assert main(["token", "add", "--join", "--uses", "3", *home]) == 0
    assert "." in capsys.readouterr().out
    assert main(["token", "list", *home]) == 0
    assert "0 of 3" in capsys.readouterr().out
    assert main(["machines", *home]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("lab0" in line and line.rstrip().endswith("free") for line in lines)
    machine.stop()
    wait_for(lambda: "lab0" not in connected(service), "it to be away", machine.log)
    assert main(["machines", *home]) == 0
    assert "away since" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["token", "add"], "name: say whose token it is"),
        (["token", "add", "--join"], "--uses: say how many"),
        (["token", "add", "ada", "--uses", "2"], "--uses: goes with --join only"),
        (["join", "manager:8700"], "url: 'manager:8700' is no address"),
        (["join", "https://manager/x"], "is no address of a manager"),
        (["join", "https://manager:x"], "is no address of a manager"),
        (["join", "http://10.0.0.1:8700"], "is plain HTTP"),
        (["join", "http://127.0.0.1:8700"], "--token-file: needed"),
        (["join", "http://127.0.0.1:8700", "--token-file", "/nowhere"], "cannot read /nowhere"),
        (["join", "http://127.0.0.1:8700", "--token-file", "/dev/null"], "holds no token"),
        ([*_KNOWN_MACHINE, "--grace", "-1"], "--grace: -1 is no time"),
        ([*_KNOWN_MACHINE, "--grace", "inf"], "--grace: inf is no time"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "manager.id").touch()
    arguments = [str(tmp_path / "known") if each == _KNOWN else each for each in arguments]
    assert main([*arguments, "--home", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
