"""The managed identity of a machine signs for Azure Blob Storage, where it may and if there is one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from azure.core.exceptions import ServiceRequestError
from azure.core.pipeline.transport import RequestsTransport
from http_answers import Answer, Request, answering
from makara.checkpoint import NoCredentials, StoreRefused, StoreUnavailable, open_store
from s3_server import free_ports

ACCOUNT = "https://a01.blob.core.windows.net"
NONE = Answer(400, json.dumps({"error": "invalid_request", "error_description": "Identity not found"}))


@dataclass
class Metadata:
    """The metadata service of a VM, which gives tokens of its identity; and what the account is sent."""

    refusal: Answer | None = None
    asked: list[Request] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        resource = parse_qs(urlsplit(request.path).query).get("resource", [""])[0]
        token = {
            "access_token": "a-token",
            "expires_in": "3600",
            "expires_on": str(int(time.time()) + 3600),
            "resource": resource,
            "token_type": "Bearer",
        }
        return self.refusal or Answer(200, json.dumps(token), "application/json")


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """It listens on loopback. Requests to the account end before they leave this machine."""
    serving = Metadata()
    send = RequestsTransport.send

    def send_or_keep(self: RequestsTransport, request: Any, **named: Any) -> Any:
        if not request.url.startswith(ACCOUNT):
            return send(self, request, **named)
        serving.sent.append(request.headers["Authorization"])
        raise ServiceRequestError("no network in this test")

    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")  # no `az` of whoever runs this
    monkeypatch.setattr(RequestsTransport, "send", send_or_keep)
    with answering(serving.answer) as address:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", address)
        yield serving


def test_a_token_of_the_machine_is_sent_to_its_account(metadata: Metadata) -> None:
    store = open_store("az://container/p", endpoint=ACCOUNT)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.put("job/a", b"x")
    assert metadata.sent == ["Bearer a-token"] * 2
    (asked,) = metadata.asked
    assert asked.headers["Metadata"] == "true"
    assert parse_qs(urlsplit(asked.path).query)["resource"] == ["https://storage.azure.com"]


def test_a_machine_without_an_identity_has_no_credentials(metadata: Metadata) -> None:
    metadata.refusal = NONE
    with pytest.raises(NoCredentials, match=r"none of AZURE_STORAGE_KEY.* nor an identity of its machine"):
        open_store("az://container/p", endpoint=ACCOUNT)
    assert metadata.sent == []


def test_an_identity_that_was_named_and_is_not_there_is_refused_in_its_own_words(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata.refusal = NONE
    monkeypatch.setenv("AZURE_CLIENT_ID", "00000000-0000-0000-0000-000000000000")
    with pytest.raises(StoreRefused, match="ManagedIdentityCredential") as refused:
        open_store("az://container/p", endpoint=ACCOUNT)
    assert not isinstance(refused.value, NoCredentials)


def test_no_metadata_service_is_no_identity(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(NoCredentials):
        open_store("az://container/p", endpoint=ACCOUNT)
