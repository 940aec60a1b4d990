"""What a store says when it cannot serve: refused for good, or worth trying again; and writers that die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import botocore.auth
import minio.time
import pytest
from http_answers import Answer, Request, answering
from lax_s3 import ABSENT, OLDER, PRESENT, LaxS3
from makara.checkpoint import Cancelled, StoreRefused, StoreUnavailable, check_writable, open_store, retrying
from makara.checkpoint.stores.advice import about_answer
from makara.checkpoint.stores.local import LocalStore
from minio import Minio
from minio.deleteobjects import DeleteError
from minio.error import S3Error
from s3_server import S3Server, free_ports


@pytest.mark.parametrize(
    "uri", ["", "checkpoints", "file://host/x", "file:relative", "s3://", "https://x/y", "s3:bucket/x"]
)
def test_a_malformed_uri_is_refused_and_named(uri: str) -> None:
    with pytest.raises(StoreRefused, match=r"checkpoint\.uri") as refused:
        open_store(uri)
    assert repr(uri) in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    uri = (tmp_path / "file" / "store").as_uri()
    with pytest.raises(StoreRefused, match="file/store"):
        check_writable(uri)


@pytest.mark.skipif(os.geteuid() == 0, reason="no folder is unwritable for root")
def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(
            StoreRefused, match=r"Permission denied.*; give the user that this process runs as"
        ):
            check_writable((tmp_path / "store").as_uri())
    finally:
        tmp_path.chmod(0o700)


def test_a_permission_error_of_the_folder_is_refused_also_for_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreRefused, match="Permission denied"):
        check_writable((tmp_path / "store").as_uri())


def test_a_missing_bucket_is_refused(s3_server: S3Server) -> None:
    with pytest.raises(StoreRefused, match=r"s3://no-such-bucket/x.*NoSuchBucket"):
        check_writable("s3://no-such-bucket/x", endpoint=s3_server.endpoint)
    store = open_store("s3://no-such-bucket/x", endpoint=s3_server.endpoint)
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        store.put("key", b"x")


def test_wrong_credentials_are_refused(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_server.uri("x"), endpoint=s3_server.endpoint)
    with pytest.raises(StoreRefused, match="SignatureDoesNotMatch"):
        check_writable(s3_server.uri("x"), endpoint=s3_server.endpoint)
    for use in (store.get, store.size, store.delete, lambda key: store.put(key, b"x")):
        with pytest.raises(StoreRefused, match=re.escape(s3_server.endpoint)):
            use("key")


def test_credentials_that_were_replaced_are_taken_anew(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    right = [s3_server.environment[name] for name in names]
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(write.format("expired", "expired"))
    store = open_store(s3_server.uri("rotated"), endpoint=s3_server.endpoint)
    with pytest.raises(StoreRefused):
        store.put("job/a", b"x")
    file.write_text(write.format(*right))
    with pytest.raises(StoreUnavailable, match="credentials were taken anew"):
        store.put("job/a", b"x")
    store.put("job/a", b"x")
    etag = store.swap("job/head", b"x", None)
    file.write_text(write.format("expired", "expired"))
    store.swap("job/head", b"y", etag)  # as long as they are not refused, they are kept


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "NoSuchUpload", "InternalError", "InvalidPart"])
def test_an_answer_that_passes_is_worth_trying_again(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    store = open_store(s3_server.uri("transient"), endpoint=s3_server.endpoint)

    def answer(*_: object) -> None:
        nothing: Any = None
        raise S3Error(nothing, code, "the store's own words", "r", "1", "h")

    monkeypatch.setattr(Minio, "put_object", answer)
    with pytest.raises(StoreUnavailable, match=f"{code}: the store's own words"):
        store.put("job/a", b"x")


def test_a_refused_deletion_says_what_the_store_said(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_server.uri("denied"), endpoint=s3_server.endpoint)
    denied = DeleteError("AccessDenied", "not yours to delete", "job/a", None)
    monkeypatch.setattr(Minio, "remove_objects", lambda *_: iter([denied]))
    with pytest.raises(StoreRefused, match="AccessDenied: not yours to delete"):
        store.delete_many(["job/a"])


@pytest.mark.parametrize(("ahead_s", "words"), [(3630, r"1:00:\d\d ahead of"), (-3630, r"1:00:\d\d behind")])
def test_a_clock_that_is_wrong_is_named_and_worth_waiting_for(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, ahead_s: int, words: str
) -> None:
    store = open_store(s3_server.uri(f"skewed{ahead_s}"), endpoint=s3_server.endpoint)
    uses: list[Callable[[], object]] = [
        lambda: store.put("job/a", b"x"),
        lambda: store.get("job/a"),
        lambda: store.exists("job/a"),  # its refusal has no body
        lambda: list(store.list("job/")),
        lambda: store.swap("job/head", b"x", None),
        lambda: list(store.unfinished("job/")),
    ]
    with monkeypatch.context() as patch:
        set_wall_clock(patch, ahead_s)
        for use in uses:
            with pytest.raises(StoreUnavailable, match=words) as refused:
                use()
            assert "clock is" in str(refused.value)
    for use in uses:
        use()


def set_wall_clock(patch: pytest.MonkeyPatch, ahead_s: int) -> None:
    """The time of day in this process, for ours and for both S3 clients."""
    ahead = timedelta(seconds=ahead_s)
    unix_time, minio_time, boto_time = time.time, minio.time.utcnow, botocore.auth.get_current_datetime
    patch.setattr(time, "time", lambda: unix_time() + ahead_s)
    patch.setattr(minio.time, "utcnow", lambda: minio_time() + ahead)
    patch.setattr(botocore.auth, "get_current_datetime", lambda: boto_time() + ahead)


def test_a_plain_refusal_is_not_taken_for_a_wrong_clock(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_server.uri("x"), endpoint=s3_server.endpoint)
    with pytest.raises(StoreRefused, match=r"AccessDenied.*; give these keys the right to read"):
        store.exists("key")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("AccessDenied", 403, "the right to read, write, list and delete"),
        ("InsufficientStorage", 507, r"checkpoint\.keep_latest_k"),
        ("NoSuchBucket", 404, None),
        ("SlowDown", 503, None),
    ],
)
def test_what_a_store_answers_comes_with_what_would_help(code: str, status: int, words: str | None) -> None:
    found = about_answer(code, status)
    assert re.search(words, found) if words is not None else not found


def test_a_store_that_nobody_reaches_points_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    store = open_store("s3://bucket/x", endpoint="http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match=r"; look at checkpoint\.endpoint and at the network"):
        store.exists("key")


def test_missing_credentials_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreRefused, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/x", endpoint="http://127.0.0.1:1")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://host", "http://host/path", "http://"])
def test_a_malformed_endpoint_is_refused_and_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(StoreRefused, match=r"checkpoint\.endpoint"):
        open_store("s3://bucket/x", endpoint=endpoint)


def test_a_server_that_is_down_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    store = open_store("s3://bucket/x", endpoint=f"http://127.0.0.1:{free_ports(1)[0]}")
    for use in (
        store.get,
        store.size,
        store.read_tagged,
        store.delete,
        lambda key: list(store.list(key)),
        lambda key: store.put(key, b"x"),
        lambda key: store.swap(key, b"x", None),
    ):
        with pytest.raises(StoreUnavailable, match="s3://bucket/x"):
            use("key")


def test_a_server_that_is_no_object_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for status, error in ((404, StoreRefused), (501, StoreRefused), (503, StoreUnavailable)):
        with (
            answering(partial(_always, Answer(status))) as endpoint,
            pytest.raises(error, match="s3://bucket/x"),
        ):
            check_writable("s3://bucket/x", endpoint=endpoint)


def _always(answer: Answer, _: Request) -> Answer:
    return answer


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: LocalStore, key: str, data: bytes, expected_etag: str | None) -> str:
        self.put(key, data)
        return "tag"

    monkeypatch.setattr(LocalStore, "swap", careless)
    with pytest.raises(StoreRefused, match="lets a write through that must fail: If-None-Match"):
        check_writable((tmp_path / "store").as_uri())
    assert list(open_store((tmp_path / "store").as_uri()).list("")) == []


@pytest.mark.parametrize("ignored", [ABSENT, OLDER, PRESENT])
def test_a_service_that_ignores_one_condition_is_refused_and_the_condition_named(
    ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    service = LaxS3(ignored)
    with service.serving() as endpoint:
        with pytest.raises(StoreRefused, match=re.escape(ignored)) as refused:
            check_writable("s3://bucket/x", endpoint=endpoint)
        assert service.objects == {}
    assert "use a newer version of this service" in str(refused.value)


def test_a_service_that_keeps_all_conditions_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    service = LaxS3()
    with service.serving() as endpoint:
        check_writable("s3://bucket/x", endpoint=endpoint)
    assert service.objects == {}


def test_objects_outlive_a_server_that_fails_and_callers_outlast_it(
    tmp_path: Path, s3_server: S3Server
) -> None:
    server = S3Server(tmp_path / "second")  # beside the shared one, which goes on serving
    server.start()
    try:
        store = open_store(server.uri("x"), endpoint=server.endpoint)
        tag = store.swap("head", b"1", None)
        server.stop(kill=True)
        starting = threading.Thread(target=server.start)

        def bring_back(error: StoreUnavailable, delay_s: float) -> None:
            if not starting.ident:
                starting.start()

        assert retrying(lambda: store.get("head"), on_retry=bring_back) == b"1"
        starting.join()
        store.swap("head", b"2", tag)
        assert store.get("head") == b"2"
    finally:
        server.stop()


def test_retrying_backs_off_within_its_patience_and_then_gives_the_error() -> None:
    now = 0.0
    delays: list[float] = []

    def fail() -> None:
        raise StoreUnavailable("away")

    def waited(error: StoreUnavailable, delay_s: float) -> None:
        nonlocal now
        assert str(error) == "away"
        delays.append(delay_s)
        now += delay_s * 1000

    with pytest.raises(StoreUnavailable, match="away"):
        retrying(
            fail,
            patience_s=15.0,
            first_delay_s=0.001,
            longest_delay_s=0.004,
            on_retry=waited,
            clock=lambda: now,
            uniform=lambda low, high: high,
        )
    assert delays == [0.001, 0.002, 0.004, 0.004, 0.004]


def test_retrying_passes_every_other_error_at_once() -> None:
    calls = 0

    def refuse() -> None:
        nonlocal calls
        calls += 1
        raise StoreRefused("no")

    with pytest.raises(StoreRefused):
        retrying(refuse)
    assert calls == 1


def test_retrying_ends_when_it_is_cancelled() -> None:
    cancel = threading.Event()

    def fail() -> None:
        raise StoreUnavailable("away")

    with pytest.raises(Cancelled):
        retrying(fail, cancel=cancel, first_delay_s=1000, on_retry=lambda *_: cancel.set(), patience_s=1e9)


def test_a_writer_killed_midway_leaves_the_old_object_and_nothing_to_see(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    store.put("job/parts/a", b"old")
    script = (
        "import os, sys; from makara.checkpoint import open_store\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "open_store(sys.argv[1]).put('job/parts/a', b'new')\n"
    )
    died = subprocess.run([sys.executable, "-c", script, (tmp_path / "store").as_uri()], check=False)
    assert died.returncode == 9
    assert store.get("job/parts/a") == b"old"
    assert list(store.list("")) == [("job/parts/a", 3)]
    assert len(list((tmp_path / "store/job/parts").iterdir())) == 2
    store.delete("job/parts/a")
    for unfinished in store.unfinished("job/"):
        store.abort(unfinished)
    assert not (tmp_path / "store/job/parts").exists()


def test_a_swap_lock_held_by_a_process_that_dies_is_free(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    script = (
        "import os, sys; from makara.checkpoint import open_store\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "open_store(sys.argv[1]).swap('head', b'1', None)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, uri], check=False).returncode == 9
    open_store(uri).swap("head", b"2", None)
    assert open_store(uri).get("head") == b"2"


def test_a_swap_lock_that_is_held_too_long_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makara.checkpoint.stores.local._LOCK_PATIENCE_S", 0.0)
    store = open_store((tmp_path / "store").as_uri())
    with store._locked("head", tmp_path / "store"), pytest.raises(StoreUnavailable, match="locked"):  # type: ignore[attr-defined]
        store.swap("head", b"x", None)


def test_a_full_disk_is_worth_waiting_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = open_store((tmp_path / "store").as_uri())
    store.put("a", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match=r"No space.*; free space there, or lower checkpoint\.keep"):
        store.put("a", b"new")
    monkeypatch.undo()
    assert store.get("a") == b"old"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]


def test_a_refusing_store_does_not_read_as_an_absent_object(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    with pytest.raises(StoreRefused):
        open_store((tmp_path / "store").as_uri()).get("job/head")
    with pytest.raises(StoreRefused):
        open_store((tmp_path / "store").as_uri()).list("job/")
