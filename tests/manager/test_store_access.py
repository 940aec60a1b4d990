"""The manager's own credentials sign for nothing but what its administrator allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from http_answers import Answer, Request, answering
from makara.checkpoint import credentials_in, inherited
from makara.manager.config import ServerConfig
from makara.manager.home import ConfigError
from makara.manager.spec.store_uri import AWS, AZURE, EVERY_FOLDER, covers
from managers import Manager, job_spec, release_all
from s3_server import S3Server

MANAGERS = {
    "AWS_ACCESS_KEY_ID": "the-managers-key",
    "AWS_SECRET_ACCESS_KEY": "the-managers-secret",
    "AWS_SESSION_TOKEN": "the-managers-session",
}
ACCOUNT = "https://a01.blob.core.windows.net"
OWN = {"AWS_ACCESS_KEY_ID": "the-jobs-key", "AWS_SECRET_ACCESS_KEY": "the-jobs-secret"}


@dataclass
class Stranger:
    """Somebody's endpoint that keeps what it is sent and says no."""

    endpoint: str = ""
    seen: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def refuse(self, request: Request) -> Answer:
        self.seen.append((request.method, request.headers))
        return Answer(403)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    stranger = Stranger()
    with answering(stranger.refuse) as stranger.endpoint:
        yield stranger


@pytest.fixture
def managers_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**MANAGERS, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


def submit(
    manager: Manager, checkpoint: Mapping[str, str], secrets: Mapping[str, str] | None = None
) -> httpx.Response:
    given = secrets or {}
    spec = job_spec(Path("/"), checkpoint=dict(checkpoint)) | {"secrets": sorted(given)}
    return manager.post_job(json.dumps(spec), secrets=json.dumps(given))


def errors(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {error["field"]: error["message"] for error in answer.json()["errors"]}


@pytest.mark.usefixtures("managers_credentials")
def test_a_users_endpoint_sees_nothing_of_the_manager(tmp_path: Path, stranger: Stranger) -> None:
    manager = Manager(tmp_path / "home").start()
    try:
        told = errors(submit(manager, {"uri": "s3://bucket/p", "endpoint": stranger.endpoint}))
        assert stranger.seen == []
        assert "AWS_ACCESS_KEY_ID" in told["checkpoint.endpoint"]
        assert f"--allow-store {stranger.endpoint}, beside those allowed now" in told["checkpoint.endpoint"]
        told = errors(submit(manager, {"uri": "s3://bucket/p", "endpoint": stranger.endpoint}, OWN))
        assert "checkpoint.uri" in told  # it was asked, and says 403
        assert stranger.seen
        for _, headers in stranger.seen:
            assert "the-jobs-key" in headers["Authorization"]
            assert "the-managers" not in json.dumps(headers)
    finally:
        manager.stop()


@pytest.mark.usefixtures("managers_credentials")
def test_an_allowed_endpoint_is_signed_for_unless_the_job_has_keys(
    tmp_path: Path, stranger: Stranger
) -> None:
    manager = Manager(tmp_path / "home", f"{stranger.endpoint}/bucket/p").start()
    try:
        for uri in ("s3://bucket", "s3://bucket/pp", "s3://other/p"):
            assert "checkpoint.endpoint" in errors(
                submit(manager, {"uri": uri, "endpoint": stranger.endpoint})
            )
        climbing = {"uri": "s3://bucket/p/../q", "endpoint": stranger.endpoint}
        assert "'..'" in errors(submit(manager, climbing))["checkpoint.uri"]
        assert "checkpoint.uri" in errors(submit(manager, {"uri": "s3://bucket/p"}))  # AWS is not named
        assert "checkpoint.uri" in errors(submit(manager, {"uri": tmp_path.as_uri()}))  # nor is a folder
        assert stranger.seen == []
        submit(manager, {"uri": "s3://bucket/p/x", "endpoint": stranger.endpoint})
        assert "the-managers-key" in stranger.seen[-1][1]["Authorization"]
        submit(manager, {"uri": "s3://bucket/p/x", "endpoint": stranger.endpoint}, OWN)
        assert "the-jobs-key" in stranger.seen[-1][1]["Authorization"]
    finally:
        manager.stop()


def test_an_account_that_is_not_azures_own_sees_nothing_of_the_manager(
    tmp_path: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        monkeypatch.setenv(name, "dGhlLW1hbmFnZXJz&sig=the-managers")
    account = f"{stranger.endpoint}/account"
    manager = Manager(tmp_path / "home", "az://", stranger.endpoint).start()
    try:
        checkpoint = {"uri": "az://container/p", "endpoint": account}
        assert "is required" in errors(submit(manager, {"uri": "az://container/p"}))["checkpoint.endpoint"]
        told = errors(submit(manager, checkpoint))["checkpoint.endpoint"]
        assert "AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING" in told
        assert "--allow-store" not in told, "that would not help"
        assert stranger.seen == []
        told = errors(submit(manager, checkpoint, {"AZURE_STORAGE_KEY": "dGhlLWpvYnM="}))
        assert "checkpoint.uri" in told  # it was asked, and says 403
        assert stranger.seen
        for _, headers in stranger.seen:
            assert headers["Authorization"].startswith("SharedKey account:")
            assert "the-managers" not in json.dumps(headers)
    finally:
        manager.stop()


def test_without_credentials_it_is_said_whose_are_missing_and_the_field_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    manager = Manager(tmp_path / "home").start()
    try:
        told = errors(submit(manager, {"uri": "s3://bucket/p"}))["checkpoint.uri"]
        assert told.startswith("s3://bucket/p: the manager has no credentials for it")
        assert "`secrets`" in told
        assert "environment of `makara server`" in told
    finally:
        manager.stop()


def test_a_job_trains_with_keys_of_its_own_on_a_store_that_the_manager_has_none_for(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: s3_server.environment[name] for name in OWN}
    for name in MANAGERS:
        monkeypatch.setenv(name, "nobodys")
    manager = Manager(tmp_path / "home").start()
    try:
        checkpoint = {"uri": s3_server.uri("own-keys"), "endpoint": s3_server.endpoint}
        answer = submit(manager, {**checkpoint, "region": s3_server.region}, own)
        assert answer.status_code == 201, answer.text
        # Its head is swapped by the manager when the first generation opens.
        manager.wait(answer.json()["job"], lambda view: view["generation"] >= 1 and view["step"] > 0)
    finally:
        manager.stop()
        release_all(manager.home)


@pytest.mark.parametrize(
    ("entry", "uri", "endpoint", "allowed"),
    [
        (AWS, "s3://b/p", None, True),
        (AWS, "s3://b/p", "https://s3.eu-central-1.amazonaws.com", True),
        (AWS, "s3://b/p", "http://s3.eu-central-1.amazonaws.com", False),
        (AWS, "s3://b/p", "https://s3.amazonaws.com.evil.example", False),
        (AWS, "s3://b/p", "https://ec2-3-1-2-3.compute-1.amazonaws.com", False),
        (AWS, "s3://b/p", "https://s3.eu-central-1.amazonaws.com:8443", False),
        (AWS, "file:///x", None, False),
        ("s3://b/p", "s3://b/p/q", None, True),
        ("s3://b/p/", "s3://b/p", None, True),
        ("s3://b/p", "s3://b/pq", None, False),
        ("s3://b", "s3://bb/p", None, False),
        ("https://store.example", "s3://b/p", "https://STORE.example:443/", True),
        ("https://store.example", "s3://b/p", "http://store.example", False),
        ("https://store.example", "s3://b/p", "https://store.example:444", False),
        ("https://store.example", "s3://b/p", "https://x@evil.example", False),
        ("https://store.example", "s3://b/p", None, False),
        ("https://store.example/b/p", "s3://b/q", "https://store.example", False),
        (AWS, "az://c/p", ACCOUNT, False),
        (AZURE, "s3://b/p", None, False),
        (AZURE, "s3://b/p", ACCOUNT, False),
        (AZURE, "az://c/p", f"{ACCOUNT}/", True),
        (AZURE, "az://c/p", "https://a01.z13.blob.storage.azure.net", True),
        (AZURE, "az://c/p", "http://a01.blob.core.windows.net", False),
        (AZURE, "az://c/p", "https://a01.blob.core.windows.net:8443", False),
        (AZURE, "az://c/p", "https://a01.blob.core.windows.net.evil.example", False),
        (AZURE, "az://c/p", "https://x@evil.example", False),
        (AZURE, "az://c/p", "https://a01.web.core.windows.net", False),
        (AZURE, "az://c/p", None, False),
        (ACCOUNT, "az://c/p", ACCOUNT, True),
        (f"{ACCOUNT}/c/p", "az://c/p/q", ACCOUNT, True),
        (f"{ACCOUNT}/c/p", "az://c/pq", ACCOUNT, False),
        (f"{ACCOUNT}/c", "az://cc/p", ACCOUNT, False),
        (ACCOUNT, "az://c/p", "https://a02.blob.core.windows.net", False),
        ("https://store.example", "az://c/p", "https://store.example/account", False),
        (EVERY_FOLDER, "az://c/p", ACCOUNT, False),
        (EVERY_FOLDER, "file:///x/y", None, True),
        ("file:///x", "file:///x/y", None, True),
        ("file:///x", "file:///x/../y", None, False),
        ("file:///x", "file:///xy", None, False),
        ("file:///x", "s3://x", None, False),
        ("s3://b/p", "s3://b/p#q", None, False),
        ("s3://b/p#q", "s3://b/p#q/r", None, True),
        ("s3://b/p#q", "s3://b/p", None, False),
        ("s3://b/p?q", "s3://b/p?r", None, False),
        ("file:///x#y", "file:///x/z", None, False),
        ("file:///x", "file:///x#y", None, False),
        ("file:///x#y", "file:///x%23y/z", None, True),
        (f"{ACCOUNT}/c/p", "az://c/p?q", ACCOUNT, False),
    ],
)
def test_an_entry_allows_what_it_names_and_no_more(
    entry: str, uri: str, endpoint: str | None, allowed: bool
) -> None:
    assert covers(entry, uri, endpoint) is allowed


def test_a_folder_is_what_its_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
    assert not covers((tmp_path / "allowed").as_uri(), (tmp_path / "allowed/link/x").as_uri(), None)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "bucket",
        "ftp://x",
        "http://",
        "file://host/x",
        "http://[x",
        "s3://a?b",
        "s3://user@a",
        "https://store.example/b?p",
        "https://store.example/b#p",
        "s3:/x",
        "s3:x",
        "s3:///x",
        "az://container",
        "az:",
    ],
)
def test_what_names_no_store_is_refused_at_start(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match="allow_stores"):
        ServerConfig(home=tmp_path, allow_stores=(entry,))


def test_beyond_loopback_folders_are_not_for_jobs_by_default(tmp_path: Path) -> None:
    assert ServerConfig(home=tmp_path).stores == (AWS, AZURE, EVERY_FOLDER)
    assert ServerConfig(home=tmp_path, allow_remote=True).stores == (AWS, AZURE)


def test_who_has_keys_inherits_none() -> None:
    around = {**MANAGERS, "AWS_PROFILE": "p", "PATH": "/bin"}
    assert inherited(around, OWN) == {"PATH": "/bin", **OWN}
    assert inherited(around, {"X": "1"}) == {**around, "X": "1"}
    assert "secret" not in repr(credentials_in("s3://b", MANAGERS))
    assert credentials_in("s3://b", {"AWS_ACCESS_KEY_ID": "half"}) is None
    assert credentials_in("az://c", MANAGERS) is None, "keys of another kind of store"
    azure = {"AZURE_STORAGE_KEY": "k", "AZURE_CLIENT_ID": "id", "AZURE_CLIENT_SECRET": "s"}
    own = {"AZURE_STORAGE_SAS_TOKEN": "sig=the-jobs-signature"}
    assert inherited({**around, **azure}, own) == {**around, **own}
    assert inherited({**around, **azure}, OWN) == {"PATH": "/bin", **azure, **OWN}
    assert "signature" not in repr(credentials_in("az://c", own))
