"""Trainers sign in to a store as their VM does, by what its agent asks the metadata service for."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from azure.core.exceptions import ServiceRequestError
from azure.core.pipeline.transport import RequestsTransport
from http_answers import Answer
from makara.checkpoint import StoreRefused, StoreUnavailable, open_store
from makara.protocol.messages import JobSettings, StoreConfig, StoreIdentity
from makara.worker.agent.store_sign_in import StoreSignIn
from metadata import AwsMetadata, AzureMetadata, serving
from s3_server import S3Server

ACCOUNT = "https://a01.blob.core.windows.net"
STORE_IDENTITY = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/i/store"


def job_at(store: StoreConfig) -> JobSettings:
    batch = {"seed": 1, "steps": 9, "global_batch_size": 2, "numerics": "fast", "bundle_sha256": "0" * 64}
    return JobSettings.model_validate({"job": "j", "entrypoint": "train:build", "store": store, **batch})


def role(access_key: str, secret_key: str, token: str = "") -> dict[str, str]:
    ends = datetime.now(UTC) + timedelta(hours=1)
    return {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": access_key,
        "SecretAccessKey": secret_key,
        "Token": token,
        "Expiration": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
    }


@dataclass
class Vm:
    """Its agent's part of signing in, for as long as `run` runs."""

    identity: StoreIdentity
    store: StoreConfig
    patch: pytest.MonkeyPatch

    def run(self, trainer: Callable[[dict[str, str]], Any], **own: str) -> Any:
        """What `trainer` returns, in whose environment is what the agent says and nothing else of a cloud."""

        async def main() -> Any:
            sign_in = StoreSignIn(self.identity)
            try:
                given = await sign_in.environment(job_at(self.store), own)
                for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
                    self.patch.delenv(name)
                for name, value in {**given, "AWS_EC2_METADATA_DISABLED": "true"}.items():
                    self.patch.setenv(name, value)
                return await asyncio.to_thread(trainer, given)
            finally:
                await sign_in.close()

        return asyncio.run(main())

    def opened(self) -> Any:
        return open_store(self.store.uri, endpoint=self.store.endpoint, region=self.store.region)


@pytest.fixture
def aws(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(metadata service, VM) with a role that may use a store."""
    service, keys = AwsMetadata(), s3_server.environment
    service.role = role(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
    place = StoreConfig(
        uri=s3_server.uri(uuid.uuid4().hex), endpoint=s3_server.endpoint, region=s3_server.region
    )
    with serving(service):
        yield service, Vm(StoreIdentity(kind="aws", metadata_url=service.url), place, monkeypatch)


def test_a_trainer_writes_with_the_credentials_of_its_vms_role(aws: tuple[AwsMetadata, Vm]) -> None:
    _, vm = aws

    def trainer(_: dict[str, str]) -> bytes:
        store = vm.opened()
        store.put("job/a", b"some bytes")
        etag = store.swap("job/head", b"one", None)
        store.swap("job/head", b"two", etag)
        return store.get("job/a") + store.get("job/head")

    assert vm.run(trainer) == b"some bytestwo"


def test_keys_of_the_role_that_ended_are_replaced_by_new_ones(aws: tuple[AwsMetadata, Vm]) -> None:
    service, vm = aws
    assert service.role is not None
    good, service.role = service.role, role("of-yesterday", "gone")

    def trainer(_: dict[str, str]) -> bytes:
        store = vm.opened()
        service.role = good
        with pytest.raises(StoreUnavailable, match="credentials were taken anew"):
            store.put("job/a", b"some bytes")
        store.put("job/a", b"some bytes")
        return store.get("job/a")

    assert vm.run(trainer) == b"some bytes"


def test_credentials_are_for_who_shows_the_trainers_token(aws: tuple[AwsMetadata, Vm]) -> None:
    service, vm = aws

    def stranger(given: dict[str, str]) -> list[int]:
        url = given["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
        assert httpx.URL(url).host == "127.0.0.1"
        asked = ({}, {"Authorization": "guessed"}, {"Authorization": b"\xff"}, {"X-IDENTITY-HEADER": "x"})
        with httpx.Client(trust_env=False) as client:
            answers = [client.get(url, headers=headers) for headers in asked]
            right = {"Authorization": given["AWS_CONTAINER_AUTHORIZATION_TOKEN"]}
            answers += [client.post(url, headers=right), client.get(url, headers=right)]
        assert service.role is not None
        assert all(service.role["SecretAccessKey"] not in answer.text for answer in answers[:-1])
        return [answer.status_code for answer in answers]

    assert vm.run(stranger) == [403, 403, 403, 403, 400, 200]


def test_a_job_with_keys_of_its_own_gets_none_of_the_vm(aws: tuple[AwsMetadata, Vm]) -> None:
    _, vm = aws
    assert vm.run(lambda given: given, AWS_ACCESS_KEY_ID="mine", AWS_SECRET_ACCESS_KEY="mine too") == {}
    elsewhere = Vm(vm.identity, StoreConfig(uri="file:///folder"), vm.patch)
    assert elsewhere.run(lambda given: given) == {}
    beside = Vm(StoreIdentity(), vm.store, vm.patch)
    assert beside.run(lambda given: given) == {}


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (None, "this VM has no role"),
        (Answer(503, "not now"), "HTTP 503"),
        (Answer(200, "SECRET that is no JSON"), "its answer cannot be read"),
    ],
)
def test_a_vm_that_gets_no_credentials_says_why(
    aws: tuple[AwsMetadata, Vm], broken: Answer | None, says: str
) -> None:
    service, vm = aws
    service.role, service.broken = None, broken

    def trainer(_: dict[str, str]) -> str:
        with pytest.raises(StoreRefused) as refused:
            vm.opened()
        return str(refused.value)

    found = vm.run(trainer)
    assert says in found
    assert "SECRET" not in found


# ---- Azure -------------------------------------------------------------------------------------------------


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(metadata service, VM, what the account is sent); of the two identities one may use the store."""
    sent: list[str] = []
    send = RequestsTransport.send

    def send_or_keep(self: RequestsTransport, request: Any, **named: Any) -> Any:
        if not request.url.startswith(ACCOUNT):
            return send(self, request, **named)
        sent.append(request.headers["Authorization"])
        raise ServiceRequestError("no network in this test")

    monkeypatch.setattr(RequestsTransport, "send", send_or_keep)
    monkeypatch.setenv("PATH", "")  # no `az` of whoever runs this
    service = AzureMetadata(identity_id="/leaver", store_identity_id=STORE_IDENTITY)
    place = StoreConfig(uri="az://container/prefix", endpoint=ACCOUNT)
    with ExitStack() as opened:
        opened.enter_context(serving(service))
        identity = StoreIdentity(kind="azure", metadata_url=service.url, identity_id=STORE_IDENTITY)
        yield service, Vm(identity, place, monkeypatch), sent


def test_a_trainer_on_azure_signs_with_the_identity_of_the_store(azure: Any) -> None:
    service, vm, sent = azure

    def trainer(_: dict[str, str]) -> None:
        with pytest.raises(StoreUnavailable):
            vm.opened().put("job/a", b"x")

    vm.run(trainer)
    assert sent == [f"Bearer {service.store_token}"]


def test_a_trainer_on_azure_gets_no_token_but_for_storage(azure: Any) -> None:
    _, vm, _ = azure

    def trainer(given: dict[str, str]) -> list[int]:
        headers = {"X-IDENTITY-HEADER": given["IDENTITY_HEADER"]}
        resources = (
            "https://management.azure.com/",
            "https://vault.azure.net",
            "",
            "https://storage.azure.com/",
        )
        with httpx.Client(trust_env=False, headers=headers) as client:
            asked = [client.get(given["IDENTITY_ENDPOINT"], params={"resource": each}) for each in resources]
        assert float(asked[-1].json()["expires_on"]) > time.time()
        return [answer.status_code for answer in asked]

    assert vm.run(trainer) == [403, 403, 403, 200]
