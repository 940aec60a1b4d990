"""Keys of a store that run out and are renewed by a service of their own, which may say no or be away."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from http_answers import Answer, Request, answering
from makara.checkpoint import StoreRefused, StoreUnavailable, open_store

_GRANTED = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>key</AccessKeyId>
<SecretAccessKey>secret</SecretAccessKey><SessionToken>session</SessionToken>
<Expiration>{until:%Y-%m-%dT%H:%M:%SZ}</Expiration></Credentials><AssumedRoleUser>
<AssumedRoleId>role:name</AssumedRoleId><Arn>arn</Arn></AssumedRoleUser></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
_REFUSED = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type>
<Code>{code}</Code><Message>as the administrator wants</Message></Error></ErrorResponse>"""
_EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@dataclass
class Services:
    """An S3 to which all keys have expired, and the service that renews them (STS)."""

    endpoint: str = ""
    refusal: tuple[int, str] | None = None  # what STS says instead of new keys

    def answer(self, request: Request) -> Answer:
        if request.method != "POST":
            return Answer(400, _EXPIRED)
        if self.refusal is not None:
            status, code = self.refusal
            return Answer(status, _REFUSED.format(code=code), "text/xml")
        until = datetime.now(UTC) + timedelta(hours=1)
        return Answer(200, _GRANTED.format(until=until), "text/xml")


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Services]:
    serving = Services()
    token = tmp_path / "token"
    token.write_text("who this is")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/saver")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with answering(serving.answer) as serving.endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", serving.endpoint)
        yield serving


def error_of(call: Callable[[], object]) -> BaseException:
    """What a call raises. A thread of its own makes it: one that never returned would hold the test up."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive(), "the call does not return"
    assert raised, "the call went well"
    return raised[0]


@pytest.mark.parametrize("status", [400, 401, 403])
def test_keys_that_cannot_be_renewed_are_a_refusal_and_never_a_wait(services: Services, status: int) -> None:
    store = open_store("s3://bucket/prefix", endpoint=services.endpoint)
    services.refusal = (status, "AccessDenied")
    for use in (lambda: store.get("job/a"), lambda: store.swap("job/a", b"x", None)):
        refused = error_of(use)
        assert isinstance(refused, StoreRefused), refused
        assert "as the administrator wants" in str(refused), "whoever reads it learns what to change"
    services.refusal = None
    assert "ExpiredToken" in str(error_of(lambda: store.get("job/a")))


def test_a_service_of_keys_that_is_away_is_worth_trying_again(services: Services) -> None:
    store = open_store("s3://bucket/prefix", endpoint=services.endpoint)
    services.refusal = (503, "ServiceUnavailable")
    assert isinstance(error_of(lambda: store.get("job/a")), StoreUnavailable)


def test_a_store_whose_first_keys_are_refused_is_not_opened(services: Services) -> None:
    services.refusal = (403, "AccessDenied")
    refused = error_of(lambda: open_store("s3://bucket/prefix", endpoint=services.endpoint))
    assert isinstance(refused, StoreRefused), refused
