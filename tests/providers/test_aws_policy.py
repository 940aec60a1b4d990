"""The rights in deploy/aws are what the provider needs, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aws_stand import ZONES, aws_stand
from provider_stands import boot_of
from repository import ROOT

POLICY: list[dict[str, Any]] = json.loads((ROOT / "deploy" / "aws" / "manager-policy.json").read_text())[
    "Statement"
]
# What calls of other names need besides: tags, the role that a VM is given, an account's first spot VM.
BESIDES = {"CreateTags", "PassRole", "CreateServiceLinkedRole"}
NEEDS_NO_RIGHT = {"GetCallerIdentity"}


def actions(statement: dict[str, Any]) -> list[str]:
    named = statement["Action"]
    return [named] if isinstance(named, str) else named


def test_the_policy_allows_what_the_provider_calls_and_nothing_else(tmp_path: Path) -> None:
    with aws_stand(tmp_path) as stand:
        provider, attempt = stand.aws_provider("m"), stand.attempt("vm-a")
        assert list(provider.check(stand.resources())) == []
        provider.offers(stand.resources())
        provider.create(attempt, boot_of(attempt, tmp_path))
        provider.list()
        provider.console("vm-a")
        backend, tags = stand.aws.ec2, {"makara:manager": "m", "makara:vm": "vm-a", "makara:attempt": "1"}
        subnet = stand.settings.regions["us-east-1"].subnets[ZONES[0]]
        left = [
            backend.create_volume(size=8, zone_name=ZONES[0]),
            backend.create_network_interface(subnet, None),
        ]
        backend.create_tags([thing.id for thing in left], tags)
        provider.release("vm-a")
        provider.close()
        called = set(stand.aws.calls)
    allowed = {action.partition(":")[2] for statement in POLICY for action in actions(statement)}
    assert called - NEEDS_NO_RIGHT == allowed - BESIDES


@pytest.mark.parametrize("statement", POLICY, ids=lambda statement: statement["Sid"])
def test_what_creates_or_ends_is_bound_to_a_tag_or_a_kind_of_resource(statement: dict[str, Any]) -> None:
    assert statement["Effect"] == "Allow"
    for action in actions(statement):
        assert "*" not in action
        reads = action.partition(":")[2].startswith(("Describe", "Get"))
        assert reads or statement["Resource"] != "*" or "Condition" in statement
