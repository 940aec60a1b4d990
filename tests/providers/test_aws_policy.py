"""The rights in deploy/aws are what the provider needs, and no more.

moto judges by the policy's actions. Its resources and conditions are judged here, by what the calls carry.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_rights import Rights
from aws_stand import REGION, ZONES, AwsStand, aws_stand
from makara.manager.providers import ProviderError
from makara.manager.providers.aws import AwsProvider
from moto.iam.models import iam_backends
from provider_stands import boot_of
from repository import ROOT

POLICY: list[dict[str, Any]] = json.loads((ROOT / "deploy" / "aws" / "manager-policy.json").read_text())[
    "Statement"
]
NEEDS_NO_RIGHT = {"sts:GetCallerIdentity"}
NAMES_NO_RESOURCE = ("Describe", "Get")  # of actions that only look
# The kinds of resources that RunInstances touches as it is called: what it makes, and what it is told to use.
MADE = ("instance", "volume", "network-interface", "spot-instances-request")
USED = ("image", "subnet", "security-group")

IDENTITIES = ("InstanceId", "VolumeId", "NetworkInterfaceId")  # parameters that name what is ended


def actions(statement: dict[str, Any]) -> list[str]:
    named = statement["Action"]
    return [named] if isinstance(named, str) else named


def resources(statement: dict[str, Any]) -> list[str]:
    named = statement["Resource"]
    return [named] if isinstance(named, str) else named


ALL = sorted({action for statement in POLICY for action in actions(statement)})


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[AwsStand]:
    with aws_stand(tmp_path) as made:
        made.settings = made.settings.model_copy(update={"instance_profile": "makara-worker"})
        iam_backends[made.aws.account]["aws"].create_instance_profile("makara-worker", "/", [], [])
        made.aws.quota = None  # so that the default one is asked for, too
        yield made


def life(stand: AwsStand, provider: AwsProvider, folder: Path) -> Iterator[Callable[[], object]]:
    """All that a manager asks of a provider, one after the other."""
    attempt = stand.attempt("vm-a")
    yield lambda: provider.check(stand.resources())
    yield lambda: provider.offers(stand.resources())
    yield lambda: provider.create(attempt, boot_of(attempt, folder))
    yield provider.list
    yield lambda: provider.console("vm-a")
    backend, tags = stand.aws.ec2, {"makara:manager": "m", "makara:vm": "vm-a", "makara:attempt": "1"}
    left = [
        backend.create_volume(size=8, zone_name=ZONES[0]),
        backend.create_network_interface(stand.settings.regions[REGION].subnets[ZONES[0]], None),
    ]
    backend.create_tags([thing.id for thing in left], tags)
    yield lambda: provider.release("vm-a")
    stand.wait()
    yield lambda: provider.release("vm-a")  # its VM is gone, and what it left is deleted
    provider.close()


def test_the_actions_of_the_policy_are_all_that_a_manager_needs(stand: AwsStand, tmp_path: Path) -> None:
    rights = Rights(stand.aws)
    rights.grant(ALL)
    provider = stand.aws_provider("m", rights.session)
    for step in life(stand, provider, tmp_path):
        step()
    assert not rights.refused
    assert rights.asked - NEEDS_NO_RIGHT == set(ALL)


@pytest.mark.parametrize("action", ALL)
def test_without_any_one_of_its_actions_a_manager_is_refused(
    stand: AwsStand, tmp_path: Path, action: str
) -> None:
    rights = Rights(stand.aws)
    rights.grant(ALL)
    made, attempt = stand.aws_provider("m", rights.session), stand.attempt("vm-a")
    if action not in ("ec2:CreateTags", "ec2:RunInstances") and not action.startswith("iam:"):
        made.create(attempt, boot_of(attempt, tmp_path))  # so that there is a VM to be looked at and ended
    rights.grant(set(ALL) - {action})
    told: list[str] = []
    for step in life(stand, stand.aws_provider("m", rights.session), tmp_path):
        try:
            told.append(str(step()))
        except ProviderError as error:
            told.append(str(error))
    assert rights.refused == {action}
    assert any(code in text for text in told for code in ("UnauthorizedOperation", "AccessDeniedException"))
    made.close()


@pytest.mark.parametrize("kind", [*MADE, *USED])
def test_the_policy_names_each_kind_of_resource_that_a_creation_touches(kind: str) -> None:
    account = "" if kind == "image" else "100000000000"
    arn = f"arn:aws:ec2:{REGION}:{account}:{kind}/some"
    found = [
        statement
        for statement in POLICY
        if "ec2:RunInstances" in actions(statement)
        and any(fnmatch.fnmatchcase(arn, pattern) for pattern in resources(statement))
    ]
    assert len(found) == 1
    assert ("Condition" in found[0]) == (kind in MADE)


def test_a_creation_carries_the_tag_that_the_policy_asks_for(stand: AwsStand, tmp_path: Path) -> None:
    attempt, provider = stand.attempt("vm-a"), stand.aws_provider("m")
    provider.create(attempt, boot_of(attempt, tmp_path))
    provider.close()
    (form,) = stand.aws.requests
    tagged = {
        form[key] for key in form if key.startswith("TagSpecification.") and key.endswith("ResourceType")
    }
    (statement,) = [statement for statement in POLICY if statement["Sid"] == "CreateWhatIsTagged"]
    assert statement["Condition"] == {"StringLike": {"aws:RequestTag/makara:manager": "*"}}
    assert {pattern.rpartition(":")[2].removesuffix("/*") for pattern in resources(statement)} == tagged
    for number in range(1, len(tagged) + 1):
        keys = [
            form[key] for key in form if key.startswith(f"TagSpecification.{number}.Tag.") and ".Key" in key
        ]
        assert "makara:manager" in keys


def test_what_is_ended_carries_the_tag_that_the_policy_asks_for(stand: AwsStand, tmp_path: Path) -> None:
    (statement,) = [statement for statement in POLICY if statement["Sid"] == "EndWhatIsTagged"]
    assert statement["Condition"] == {"StringLike": {"aws:ResourceTag/makara:manager": "*"}}
    ended: list[list[str]] = []
    backend = stand.aws.ec2

    def noted(_authorization: str, action: str, form: dict[str, str]) -> bool:
        if f"ec2:{action}" in actions(statement):
            (thing,) = (
                value for key, value in form.items() if key in IDENTITIES or key.startswith("InstanceId.")
            )
            ended.append([tag["key"] for tag in backend.describe_tags({"resource-id": [thing]})])
        return True

    stand.aws.allows = noted
    for step in life(stand, stand.aws_provider("m"), tmp_path):
        step()
    assert len(ended) == len(actions(statement))
    assert all("makara:manager" in tags for tags in ended)


@pytest.mark.parametrize("statement", POLICY, ids=lambda statement: statement["Sid"])
def test_what_creates_or_ends_is_bound_to_a_tag_or_a_kind_of_resource(statement: dict[str, Any]) -> None:
    assert statement["Effect"] == "Allow"
    for action in actions(statement):
        assert "*" not in action
        reads = action.partition(":")[2].startswith(NAMES_NO_RESOURCE)
        assert reads or statement["Resource"] != "*" or "Condition" in statement
