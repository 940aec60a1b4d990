"""Credentials that fail for a while: nothing is given up, and what comes later is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aws_stand import AwsStand
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError
from azure.identity import CredentialUnavailableError
from azure_stand import AzureCloud, StaticCredential, user_data
from botocore.exceptions import ClientError, CredentialRetrievalError, NoCredentialsError, SSOError
from makara.manager.providers import NotAllowed, ProviderError, Unauthenticated
from makara.manager.providers.aws import AwsProvider
from makara.manager.providers.aws.errors import RegionDisabled, translated
from makara.manager.providers.azure import errors
from makara.manager.providers.azure.opening import Renewed
from makara.manager.providers.azure.provider import AzureProvider
from provider_stands import boot_of

# ---- what is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ExpiredToken", 400, Unauthenticated),
        ("RequestExpired", 400, Unauthenticated),
        ("AuthFailure", 401, Unauthenticated),
        ("InvalidClientTokenId", 403, Unauthenticated),
        ("UnauthorizedOperation", 403, NotAllowed),
        ("OptInRequired", 401, RegionDisabled),
    ],
)
def test_aws_tells_a_passing_fault_of_credentials_from_a_missing_right(
    code: str, status: int, kind: type[ProviderError]
) -> None:
    answer: Any = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(ProviderError) as caught, translated("create"):
        raise ClientError(answer, "RunInstances")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        CredentialRetrievalError(provider="iam-role", error_msg="timed out"),
        SSOError(),
    ],
)
def test_a_call_to_aws_that_could_not_be_signed_did_nothing(error: Exception) -> None:
    with pytest.raises(Unauthenticated), translated("create"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        CredentialUnavailableError(message="ManagedIdentityCredential: IMDS timed out"),
        ClientAuthenticationError(message="AADSTS90033: a transient error has occurred"),
    ],
)
def test_a_sign_in_at_azure_that_failed_may_succeed_later(error: ClientAuthenticationError) -> None:
    assert type(errors.of_request(error)) is Unauthenticated


def test_a_token_that_azure_refuses_may_be_renewed(cloud: AzureCloud) -> None:
    cloud.stand_in.expired = True
    with pytest.raises(Unauthenticated):
        cloud.provider().list()


# ---- what comes later is used ------------------------------------------------------------------------------


def test_aws_is_asked_with_credentials_that_came_after_the_first_call(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    provider = AwsProvider(stand.settings, manager="m", render=stand.user_data)
    with pytest.raises(Unauthenticated):
        provider.list()
    file.write_text("[default]\naws_access_key_id = id\naws_secret_access_key = key\n")
    assert list(provider.list()) == []
    provider.close()


class Identity:
    """A credential of a VM whose metadata service answers only later."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        if not self._answers:
            raise CredentialUnavailableError(message="no answer of the metadata service")
        return StaticCredential().get_token(*scopes)


def provider_with(cloud: AzureCloud, make: Callable[[], Any]) -> AzureProvider:
    return AzureProvider(cloud.settings(), "first", user_data, credential=Renewed(make), poll_s=0.001)


def test_azure_is_signed_in_to_anew_after_a_sign_in_failed(cloud: AzureCloud) -> None:
    made = iter([Identity(answers=False), Identity(answers=True)])
    provider = provider_with(cloud, lambda: next(made))
    with pytest.raises(Unauthenticated):
        provider.list()
    assert list(provider.list()) == []
    provider.close()


def test_of_a_vm_that_was_made_a_failed_sign_in_says_nothing(cloud: AzureCloud) -> None:
    """Only a call that asked for nothing has created nothing."""
    provider = cloud.provider()
    attempt = cloud.attempt()
    cloud.account.steps = 10**6
    cloud.stand_in.loses_answers_of = {"PUT"}
    with pytest.raises(ProviderError):
        provider.create(attempt, boot_of(attempt, Path("/nowhere")))
    cloud.stand_in.expires_after = len(cloud.stand_in.requests) + 4  # with it, the VM is followed
    with pytest.raises(ProviderError) as caught:
        provider.create(attempt, boot_of(attempt, Path("/nowhere")))
    assert type(caught.value) is ProviderError
