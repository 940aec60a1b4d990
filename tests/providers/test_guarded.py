"""What a provider raises that nobody foresaw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makara.manager.providers import Provider, ProviderError, Throttled
from makara.manager.providers.guarded import Guarded
from makara.manager.providers.opening import open_clouds
from makara.manager.providers.settings import AwsSettings, CloudSettings
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Attempt, Placement
from provider_stands import boot_of

ATTEMPT = Attempt(vm="vm-a", placement=Placement(provider="aws"))


class Broken:
    """Every call of it raises this."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> Any:
            raise self._error

        return call


def calls(provider: Provider) -> list[Any]:
    wish = Resources(provider="local", max_nodes=1)
    return [
        lambda: provider.create(ATTEMPT, boot_of(ATTEMPT, Path("/nowhere"))),
        lambda: provider.release("vm-a", 1),
        lambda: provider.look("vm-a", 1),
        provider.list,
        lambda: provider.check(wish),
        lambda: provider.offers(wish),
        lambda: provider.console("vm-a", 1),
    ]


@pytest.mark.parametrize(
    "error", [KeyError("makara:vm"), json.JSONDecodeError("Expecting value", "<html>", 0), AssertionError()]
)
def test_whatever_a_provider_raises_leaves_the_outcome_unknown(error: Exception) -> None:
    for call in calls(Guarded("aws", Broken(error))):
        with pytest.raises(ProviderError, match=type(error).__name__) as caught:
            call()
        assert type(caught.value) is ProviderError


def test_what_a_provider_tells_is_told() -> None:
    for call in calls(Guarded("aws", Broken(Throttled("slowly")))):
        with pytest.raises(Throttled, match="slowly"):
            call()


def test_every_cloud_is_opened_with_that_guard() -> None:
    region = {"subnets": {"us-east-1a": "subnet-1"}, "security_groups": ["sg-1"]}
    settings = CloudSettings(aws=AwsSettings.model_validate({"regions": {"us-east-1": region}}))
    provider = open_clouds(settings, "m", lambda attempt, boot: b"")["aws"]
    assert isinstance(provider, Guarded)
    provider.close()
