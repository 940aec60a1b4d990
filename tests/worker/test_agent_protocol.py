"""A real manager, and agents of other versions that a test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from makara.manager.service.tokens import Scope, TokenStore
from makara.protocol.frames import read_refusal, read_to_agent
from makara.protocol.messages import PROTOCOL, Credential, DeviceInfo, Report, ReportAck, Welcome
from managers import Manager, release_all
from web_sockets import web_socket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("protocol") / "home").start()
    running.client.post("/providers/local/capacity", json={"vms": 0})  # a test plays the VMs
    yield running
    running.stop()
    release_all(running.home)


@pytest.fixture
def job(manager: Manager, tmp_path: Path) -> Iterator[str]:
    """One that asks for two VMs. Jobs queue for them: it is the only one that does."""
    name = manager.submit(tmp_path / "store").json()["job"]
    manager.wait(name, lambda view: len(view["vms"]) == 2)
    yield name
    manager.client.post(f"/jobs/{name}/stop")


def token_of(manager: Manager, job: str, scope: Scope = Scope.JOIN, ttl_s: float = 600.0) -> str:
    """A token as the manager itself would make it, for the job's first VM."""
    with closing(TokenStore(manager.home / "tokens.sqlite3")) as tokens:
        return tokens.issue(scope, job=job, vm=f"{job}-vm0", ttl_s=ttl_s)


def call(manager: Manager, vm: str, token: str) -> ClientConnection:
    return web_socket(manager.url, f"/api/v1/agents/{vm}", {"Authorization": f"Bearer {token}"})


def first(connection: ClientConnection, kind: type[Any]) -> Any:
    """The next frame of a kind."""
    while True:
        message = read_to_agent(connection.recv(timeout=300))
        if isinstance(message, kind):
            return message


def report(vm: str, sequence: int = 1) -> dict[str, Any]:
    device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 34)
    value = Report(
        vm=vm, sequence=sequence, orders_version=0, address="127.0.0.1", devices=[device], workers=[]
    )
    return value.model_dump(mode="json")


def test_a_join_token_is_good_until_the_worker_token_was_shown(manager: Manager, job: str) -> None:
    vm, join = f"{job}-vm0", token_of(manager, job)
    for _ in range(2):  # the first connection may break before the successor is delivered
        with call(manager, vm, join) as connection:
            successor = first(connection, Credential).token
    headers = {"Authorization": f"Bearer {successor}"}
    assert manager.http.get(f"/api/v1/jobs/{job}/bundle", headers=headers).status_code == 200
    with pytest.raises(InvalidStatus):
        call(manager, vm, join)
    with call(manager, vm, successor) as connection:
        assert first(connection, Welcome).protocol == PROTOCOL


def test_who_is_refused_gets_the_managers_own_word(manager: Manager, job: str) -> None:
    vm = f"{job}-vm0"
    with call(manager, vm, token_of(manager, job)) as connection:
        identity = first(connection, Welcome).manager
    expired = token_of(manager, job, Scope.WORKER, ttl_s=0.0)
    for name, token in ((vm, "x.y"), (vm, expired), (f"{job}-vm1", token_of(manager, job))):
        with pytest.raises(InvalidStatus) as refused:
            call(manager, name, token)
        assert refused.value.response.status_code == 403
        refusal = read_refusal(bytes(refused.value.response.body))
        assert refusal is not None
        assert (refusal.refused, refusal.manager) == (name, identity)
        assert refusal.reason


def test_what_a_newer_agent_adds_is_passed_over(manager: Manager, job: str) -> None:
    vm = f"{job}-vm0"
    with call(manager, vm, token_of(manager, job)) as connection:
        connection.send(json.dumps({**report(vm), "colour": "red"}))
        assert first(connection, ReportAck).sequence == 1


def test_values_that_a_newer_agent_tells_are_taken_and_why_it_holds_is_shown(
    manager: Manager, job: str
) -> None:
    """Found: an unknown kind of failure closed the connection, again and again."""
    vm = f"{job}-vm0"
    failure = {"kind": "struck by lightning", "message": "it smells of ozone"}
    worker = {"worker": f"{vm}.0", "incarnation": 1, "phase": "levitating", "failure": failure}
    newer = {"workers": [worker], "progress": [{"at": "at the beach"}], "holding": "its version is too new"}
    with call(manager, vm, token_of(manager, job)) as connection:
        connection.send(json.dumps({**report(vm), **newer}))
        assert first(connection, ReportAck).sequence == 1
        trouble = f"VM {vm}: its version is too new"
        manager.wait(job, lambda view: trouble in view["trouble"])
        view = manager.client.get(f"/jobs/{job}")
        assert view["status"] not in ("failed", "stopped")


def test_an_agent_of_another_protocol_is_kept_and_shown(manager: Manager, job: str) -> None:
    vm = f"{job}-vm0"

    def trouble() -> str:
        return "\n".join(manager.client.get(f"/jobs/{job}")["trouble"])

    with call(manager, vm, token_of(manager, job)) as connection:
        connection.send(json.dumps({"vm": vm, "protocol": PROTOCOL + 1, "makara": "7.7", "more": 1}))
        manager.wait(job, lambda view: any("7.7" in text for text in view["trouble"]))
        assert f"VM {vm}: the agent (makara 7.7) speaks protocol {PROTOCOL + 1}" in trouble()
        connection.send(json.dumps(report(vm)))  # on the same connection: it was not closed
        first(connection, ReportAck)
        assert "7.7" not in trouble()


def test_a_report_that_cannot_be_read_ends_the_connection_and_is_shown(manager: Manager, job: str) -> None:
    vm = f"{job}-vm0"
    with call(manager, vm, token_of(manager, job)) as connection:
        connection.send('{"vm": 7}')
        with pytest.raises(ConnectionClosed, match="malformed report"):
            first(connection, ReportAck)
    manager.wait(job, lambda view: any("cannot be read" in text for text in view["trouble"]))


def test_a_report_that_is_too_large_is_answered_with_1009_and_the_limit_was_told(
    manager: Manager, job: str
) -> None:
    vm = f"{job}-vm0"
    with call(manager, vm, token_of(manager, job)) as connection:
        limit = first(connection, Welcome).max_report_bytes
        connection.send(json.dumps({**report(vm), "padding": "x" * (limit - 1000)}))
        assert first(connection, ReportAck).sequence == 1
        connection.send(json.dumps({**report(vm, 2), "padding": "x" * limit}))
        with pytest.raises(ConnectionClosed) as closed:
            first(connection, type(None))
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
