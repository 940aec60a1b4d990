"""What Azure Blob Storage answers, as callers see it; what is said of it, and what stays out of logs."""

from __future__ import annotations

import base64
import logging
import time
import traceback
import uuid
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
from azurite_server import AzuriteServer
from conftest import StoreAddress
from http_answers import Answer, Request, answering
from makara.checkpoint import (
    NotFound,
    Store,
    StoreRefused,
    StoreUnavailable,
    check_writable,
    credentials_in,
    open_store,
)
from s3_server import free_ports


@pytest.fixture
def place(azurite: AzuriteServer) -> StoreAddress:
    return StoreAddress(azurite.uri(uuid.uuid4().hex), azurite.endpoint)


def test_a_signature_is_in_no_error_and_no_log(
    azurite: AzuriteServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    token = azurite.sas(rights="r")
    signature = token.partition("sig=")[2].partition("&")[0]
    found = credentials_in("az://", {"AZURE_STORAGE_SAS_TOKEN": token})
    away = f"http://127.0.0.1:{free_ports(1)[0]}/makara"
    for endpoint, kind in ((azurite.endpoint, StoreRefused), (away, StoreUnavailable)):
        store = open_store(azurite.uri("said"), endpoint=endpoint, credentials=found)
        for use in uses(store):
            with pytest.raises(kind) as failed:
                use()
            told = "".join(traceback.format_exception(failed.value))
            assert signature not in told
            assert azurite.key not in told
    assert "http" not in caplog.text, "requests are no news"
    assert signature not in repr(store.__dict__)


def uses(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.put("job/a", b"x"),
        lambda: list(store.list("job/")),
        lambda: store.swap("job/head", b"x", None),
        lambda: store.delete("job/a"),
    ]


def test_a_signature_that_has_run_out_is_refused_in_azures_words(azurite: AzuriteServer) -> None:
    expired = {"AZURE_STORAGE_SAS_TOKEN": azurite.sas(lasts_s=-60.0)}
    store = open_store(
        azurite.uri("x"), endpoint=azurite.endpoint, credentials=credentials_in("az://", expired)
    )
    with pytest.raises(StoreRefused, match=r"AuthorizationFailure|AuthenticationFailed"):
        store.put("job/a", b"x")


def test_a_missing_container_and_a_wrong_key_are_refused(
    azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreRefused, match=r"az://no-such-container/x.*ContainerNotFound"):
        check_writable("az://no-such-container/x", endpoint=azurite.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_KEY", base64.b64encode(b"wrong").decode())
    store = open_store(azurite.uri("x"), endpoint=azurite.endpoint)
    for use in (*uses(store), lambda: store.exists("job/a"), lambda: store.get("job/a")):
        with pytest.raises(StoreRefused, match=r"; give this key, signature or identity the right to read"):
            use()


ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>in its words\nRequestId:1</Message></Error>"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "ServerBusy", StoreUnavailable),
        (500, "OperationTimedOut", StoreUnavailable),
        (429, "TooManyRequests", StoreUnavailable),
        (400, "InvalidBlockList", StoreUnavailable),
        (409, "ContainerBeingDeleted", StoreUnavailable),
        (412, "LeaseIdMissing", StoreRefused),
        (409, "BlobImmutableDueToPolicy", StoreRefused),
        (403, "AuthorizationPermissionMismatch", StoreRefused),
        (401, "NoAuthenticationInformation", StoreRefused),
        (501, "NotImplemented", StoreRefused),
        (404, "BlobNotFound", NotFound),
    ],
)
def test_an_answer_is_refused_or_worth_trying_again_and_asked_for_once(
    status: int, code: str, kind: type[Exception]
) -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Answer:
        asked.append(request)
        return Answer(status, ERROR.format(code))

    found = credentials_in("az://", {"AZURE_STORAGE_KEY": "eA=="})
    with answering(answer) as endpoint:
        store = open_store("az://container/p", endpoint=f"{endpoint}/account", credentials=found)
        with pytest.raises(kind) as failed:
            store.put("job/a", b"x")
        with pytest.raises(kind):
            store.swap("job/a", b"x", '"tag"') if kind is not NotFound else store.get("job/a")
    assert len(asked) == 2
    assert type(failed.value) is kind
    if kind is not NotFound:
        assert f"{code}: in its words" in str(failed.value)


@pytest.mark.parametrize(("ahead_s", "words"), [(3630, "1:00:.* ahead of"), (-3630, "1:00:.* behind")])
def test_a_wrong_clock_is_named_and_worth_waiting_for(
    monkeypatch: pytest.MonkeyPatch, ahead_s: int, words: str
) -> None:
    found = credentials_in("az://", {"AZURE_STORAGE_KEY": "eA=="})
    refused = Answer(403, ERROR.format("AuthenticationFailed"))
    with answering(lambda _: refused) as endpoint:
        store = open_store("az://container/p", endpoint=f"{endpoint}/account", credentials=found)
        with pytest.raises(StoreRefused, match="AuthenticationFailed"):
            store.put("job/a", b"x")
        date = formatdate(time.time() - ahead_s, usegmt=True)
        monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: date)
        with pytest.raises(StoreUnavailable, match=words):
            store.put("job/a", b"x")


def test_a_server_that_answers_no_more_is_unavailable_and_served_again_when_it_does(
    place: StoreAddress, azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makara.checkpoint.stores.azure_account._READ_TIMEOUT_S", 0.5)
    store = place.open()
    tag = store.swap("job/head", b"1", None)
    azurite.pause()
    try:
        for use in uses(store):
            with pytest.raises(StoreUnavailable, match=r"; look at checkpoint\.endpoint and at the network"):
                use()
    finally:
        azurite.go_on()
    azurite.stop()
    try:
        with pytest.raises(StoreUnavailable):
            store.get("job/head")
    finally:
        azurite.start()
    tagged = store.read_tagged("job/head")
    assert tagged is not None
    assert tagged[1] == tag or tagged[0] == b"x", "what the stopped server may still have done"
