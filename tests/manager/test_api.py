"""The API as a program meets it: submissions are checked whole; nothing changes without a token."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from makara.manager.api.app import MODULES
from makara.manager.cli.client import RequestRefused
from managers import Manager, archive, job_spec, release_all
from starlette.routing import Route, WebSocketRoute
from web_sockets import web_socket
from websockets.exceptions import InvalidStatus

PUBLIC = {
    ("GET", "/healthz"),
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/page/{name}"),
    ("GET", "/api/v1/machines/challenge"),
}
ROUTES = [route for module in MODULES for route in module.router.routes]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    folder = tmp_path_factory.mktemp("api")
    running = Manager(folder / "home", "file:///", (folder / "shared").as_uri()).start()
    running.client.post("/providers/local/capacity", json={"vms": 0})  # no VM: these tests need none
    yield running
    running.stop()
    release_all(running.home)


def fields(response: Any) -> dict[str, str]:
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    return {error["field"]: error["message"] for error in response.json()["errors"]}


def stored(manager: Manager) -> set[str]:
    jobs = {job["job"] for job in manager.client.get("/jobs")["jobs"]}
    folders = {path.name for path in (manager.home / "jobs").glob("*")}
    assert folders == jobs
    return jobs


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"training": {"colour": 1}}, "training.colour", "unknown"),
        ({"training": {"steps": "many"}}, "training.steps", "many"),
        ({"training": {"global_batch_size": 5}, "parallelism": {"microbatch_size": 2}}, "", "divisible"),
        ({"resources": {"provider": "moon"}}, "resources.provider", "unknown provider"),
        ({"checkpoint": {"uri": "./here"}}, "checkpoint.uri", "relative"),
        ({"checkpoint": {"uri": "file:///dev/null/x"}}, "checkpoint.uri", "/dev/null/x"),
        ({"checkpoint": {"uri": "ftp://x/y"}}, "checkpoint.uri", "ftp"),
    ],
)
def test_a_faulty_specification_names_its_field_and_stores_nothing(
    manager: Manager, tmp_path: Path, changes: dict[str, Any], field: str, says: str
) -> None:
    before = stored(manager)
    found = fields(manager.submit(tmp_path / "store", **changes))
    assert any(field in name and says in message for name, message in found.items()), found
    assert stored(manager) == before


@pytest.mark.parametrize("spec", ["", "[", "[]", "{}", "null", '{"name": NaN}'])
def test_what_is_no_specification_is_refused(manager: Manager, spec: str) -> None:
    assert manager.post_job(spec).status_code == 422


@pytest.mark.parametrize(
    "bundle",
    [b"", b"junk", archive({"../up.py": b""}), archive({"/etc/x": b""})],
    ids=["empty", "junk", "a parent's file", "an absolute path"],  # an archive's bytes tell when it was made
)
def test_a_bundle_that_is_no_archive_of_plain_files_is_refused(
    manager: Manager, tmp_path: Path, bundle: bytes
) -> None:
    before = stored(manager)
    assert "bundle" in fields(manager.post_job(json.dumps(job_spec(tmp_path)), bundle=bundle))
    assert stored(manager) == before


def test_a_body_that_is_too_large_is_refused_unread(manager: Manager) -> None:
    address = httpx.URL(manager.url)
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: {address.host}\r\nContent-Length: {1 << 40}\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/login", "/api/v1/tokens", "/nowhere"])
def test_a_strangers_body_is_refused_unread(manager: Manager, path: str) -> None:
    address = httpx.URL(manager.url)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Length: {40 << 20}\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(head.encode())  # and no byte of what it announces
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_a_page_session_ends_with_its_token_and_so_does_what_it_watches(
    manager: Manager, tmp_path: Path
) -> None:
    token = manager.client.post("/tokens", json={"name": "ada"})["token"]
    store = manager.home.parent / "shared"
    job = manager.submit(store, token=token, resources={"provider": "static"}).json()["job"]
    page = httpx.Client(base_url=manager.url, trust_env=False, timeout=30)
    assert page.post("/login", data={"token": token}).status_code == 200
    with page.stream("GET", f"/api/v1/jobs/{job}/stream") as response:
        lines = response.iter_lines()
        assert next(lines) == "event: status"
        admin = {"Authorization": f"Bearer {manager.token}"}
        manager.http.delete(f"/api/v1/tokens/{token.split('.')[0]}", headers=admin)
        for _ in lines:  # it ends by itself
            pass
    assert page.get("/session").status_code == 401
    page.close()


def test_secrets_must_be_those_that_the_job_names(manager: Manager, tmp_path: Path) -> None:
    spec = job_spec(tmp_path) | {"secrets": ["WANDB_KEY"]}
    assert "WANDB_KEY" in fields(manager.post_job(json.dumps(spec)))["secrets"]


def test_the_same_key_is_the_same_job(manager: Manager, tmp_path: Path) -> None:
    first, second = (manager.submit(tmp_path / "store", key="k1") for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["job"] == second.json()["job"]
    assert manager.submit(tmp_path / "store", key="k1", training={"steps": 9}).status_code == 409
    assert manager.submit(tmp_path / "store", key="k2").json()["job"] != first.json()["job"]


def test_what_does_not_exist_is_404(manager: Manager) -> None:
    for path in ("", "/events", "/metrics", "/vms", "/checkpoints", "/logs", "/plan", "/stream"):
        with pytest.raises(RequestRefused, match="no job 'nobody'") as refused:
            manager.client.get(f"/jobs/nobody{path}")
        assert refused.value.status == 404
    with pytest.raises(RequestRefused, match="not running"):
        manager.client.post("/vms/nobody/fault", json={"kind": "kill"})


HUGE = "9" * 30


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("events", "since"),
        ("events", "limit"),
        ("metrics", "since"),
        ("decisions", "since"),
        ("decisions", "limit"),
        ("vms", "offset"),
    ],
)
@pytest.mark.parametrize("number", ["-1", HUGE, "9" * 5000], ids=["negative", "huge", "thousands of digits"])
def test_a_number_that_no_history_reaches_is_refused_by_the_name_of_its_parameter(
    manager: Manager, tmp_path: Path, path: str, name: str, number: str
) -> None:
    job = manager.submit(tmp_path.parent / "bounds", key="bounds").json()["job"]
    admin = {"Authorization": f"Bearer {manager.token}"}
    answer = manager.http.get(f"/api/v1/jobs/{job}/{path}", params={name: number}, headers=admin)
    assert list(fields(answer)) == [name]


@pytest.mark.parametrize(
    "number", [HUGE, "9" * 5000, b"\xb2"], ids=["huge", "thousands of digits", "squared"]
)
def test_a_last_event_id_that_no_event_has_is_refused(
    manager: Manager, tmp_path: Path, number: str | bytes
) -> None:
    job = manager.submit(tmp_path.parent / "bounds", key="bounds").json()["job"]
    shown = {b"Authorization": f"Bearer {manager.token}".encode()}
    shown[b"Last-Event-ID"] = number if isinstance(number, bytes) else number.encode()
    assert list(fields(manager.http.get(f"/api/v1/jobs/{job}/stream", headers=shown))) == ["last-event-id"]


def test_the_stream_tells_the_present_then_history_after_an_id(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    manager.client.post(f"/jobs/{job}/stop")
    manager.wait(job, lambda view: view["status"] == "stopped")
    headers = {"Authorization": f"Bearer {manager.token}", "Last-Event-ID": "1"}
    with manager.http.stream("GET", f"/api/v1/jobs/{job}/stream", headers=headers) as response:
        seen: list[str] = []
        for line in response.iter_lines():
            seen.append(line)
            if line == "id: 3":
                break
    assert seen[0] == "event: status"
    assert [line for line in seen if line.startswith("id:")] == ["id: 2", "id: 3"]
    history = manager.client.get(f"/jobs/{job}/events", since=2)["events"]
    assert history[0]["sequence"] == 3


def test_prometheus_reads_the_metrics(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    text = manager.http.get("/metrics", headers={"Authorization": f"Bearer {manager.token}"}).text
    assert f'makara_steps{{job="{job}"}} 20' in text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? [-+.\deinfa]+", line), line


# ---- who may do what ---------------------------------------------------------------------------------------


def http_routes() -> list[tuple[str, str]]:
    return [(m, r.path) for r in ROUTES if isinstance(r, Route) for m in r.methods or () if m != "HEAD"]


def test_every_route_refuses_who_shows_no_token(manager: Manager) -> None:
    described = manager.http.get("/openapi.json").json()["paths"]
    listed = {(m.upper(), path) for path, methods in described.items() for m in methods}
    assert listed <= set(http_routes())  # the walk below misses none
    assert len(listed) > 15
    for method, path in http_routes():
        filled = re.sub(r"\{\w+\}", "app.js", path)
        for headers in ({}, {"Authorization": "Bearer x.y"}, {"Cookie": "makara_session=x.y"}):
            status = manager.http.request(method, filled, headers=headers).status_code
            if (method, path) in PUBLIC:
                assert status == 200, (method, path)
            else:
                assert status in (401, 403), (method, path, status)


def test_sockets_refuse_who_shows_no_token_of_that_vm(manager: Manager) -> None:
    paths = [route.path for route in ROUTES if isinstance(route, WebSocketRoute)]
    assert paths == ["/api/v1/agents/{vm}", "/api/v1/machines/connection"]
    for path, status in zip(paths, (403, 401), strict=True):
        for headers in ({}, {"Authorization": "Bearer x.y"}, {"Authorization": f"Bearer {manager.token}"}):
            with pytest.raises(InvalidStatus) as refused:
                web_socket(manager.url, path.format(vm="vm"), headers)
            assert refused.value.response.status_code == status


def test_a_user_works_with_jobs_and_not_with_faults_or_tokens(manager: Manager, tmp_path: Path) -> None:
    token = manager.client.post("/tokens", json={"name": "ada"})["token"]
    headers = {"Authorization": f"Bearer {token}"}
    assert manager.http.get("/api/v1/jobs", headers=headers).status_code == 200
    for path, body in (("vms/x/fault", {"kind": "kill"}), ("tokens", {"name": "bob"})):
        assert manager.http.post(f"/api/v1/{path}", json=body, headers=headers).status_code == 403
    assert manager.http.get("/api/v1/jobs/x/bundle", headers=headers).status_code == 401
    admin = {"Authorization": f"Bearer {manager.token}"}
    revoked = manager.http.delete(f"/api/v1/tokens/{token.split('.')[0]}", headers=admin)
    assert revoked.status_code == 204
    assert manager.http.get("/api/v1/jobs", headers=headers).status_code == 401


def test_a_name_that_points_to_loopback_from_elsewhere_is_refused(manager: Manager) -> None:
    assert manager.http.get("/healthz", headers={"Host": "evil.example"}).status_code == 400
