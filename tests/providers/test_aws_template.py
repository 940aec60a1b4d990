"""What the CloudFormation template makes is what the settings take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import yaml
from aws_stand import REGION, aws_stand
from makara.manager.providers.settings import AwsSettings
from moto.iam.models import iam_backends
from provider_stands import boot_of
from repository import ROOT


def test_a_vm_is_made_in_what_the_template_made(tmp_path: Path) -> None:
    with aws_stand(tmp_path) as stand:
        session = boto3.Session(aws_access_key_id="id", aws_secret_access_key="key", region_name=REGION)
        clouds = session.client("cloudformation", endpoint_url=stand.endpoint)
        clouds.create_stack(
            StackName="makara",
            TemplateBody=(ROOT / "deploy" / "aws" / "network.yaml").read_text(),
            Parameters=parameters(Bucket="checkpoints", ManagerFrom="203.0.113.0/24"),
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        clouds.create_stack(
            StackName="without-manager",
            TemplateBody=(ROOT / "deploy" / "aws" / "network.yaml").read_text(),
            Parameters=parameters(Bucket="checkpoints", Role="there"),
        )
        (other,) = clouds.describe_stacks(StackName="without-manager")["Stacks"]
        assert "ManagerSecurityGroups" not in {entry["OutputKey"] for entry in other["Outputs"]}
        (stack,) = clouds.describe_stacks(StackName="makara")["Stacks"]
        clouds.close()
        told = {entry["OutputKey"]: entry["OutputValue"] for entry in stack["Outputs"]}
        region = {
            "subnets": yaml.safe_load(told["Subnets"]),
            "security_groups": yaml.safe_load(told["SecurityGroups"]),
            "image": stand.image,
        }
        stand.settings = AwsSettings.model_validate(
            {
                "regions": {REGION: region},
                "instance_profile": told["InstanceProfile"],
                "endpoint_url": stand.endpoint,
            }
        )
        zone = next(iter(region["subnets"]))
        attempt = stand.attempt("vm-a")
        attempt = attempt.model_copy(
            update={"placement": attempt.placement.model_copy(update={"zone": zone})}
        )
        made = stand.aws_provider().create(attempt, boot_of(attempt, tmp_path))
        instance = stand.aws.ec2.get_instance(made)
        assert instance.subnet_id == region["subnets"][zone]
        assert [group.id for group in instance.nics[0].group_set] == region["security_groups"]
        assert set(stand.billed()) == {"vm-a"}

        (group,) = stand.aws.ec2.describe_security_groups(
            group_ids=yaml.safe_load(told["ManagerSecurityGroups"])
        )
        rules = [(rule.from_port, rule.to_port, rule.ip_protocol) for rule in group.ingress_rules]
        assert set(rules) == {(8700, 8700, "tcp")}
        people, workers = group.ingress_rules
        assert people.ip_range["CidrIp"] == "203.0.113.0/24"
        assert [workers.source_group["GroupId"]] == region["security_groups"]
        iam = iam_backends[stand.aws.account]["aws"]
        (role,) = iam.get_instance_profile("makara-manager").roles
        assert role.policies["manager"] == json.loads(
            (ROOT / "deploy" / "aws" / "manager-policy.json").read_text()
        )


# https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/aws-resource-ec2-securitygroup.html
DESCRIPTION = re.compile(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{1,255}")


def test_descriptions_of_groups_and_rules_have_only_what_ec2_allows() -> None:
    """moto takes any; EC2 refuses the group, and so CloudFormation the whole stack."""
    resources = yaml.load(
        (ROOT / "deploy" / "aws" / "network.yaml").read_text(),
        Loader=Intrinsics,
    )["Resources"]
    groups = [one for one in resources.values() if one["Type"].startswith("AWS::EC2::SecurityGroup")]
    texts = list(descriptions([one["Properties"] for one in groups]))
    assert len(texts) == 6
    assert [text for text in texts if not DESCRIPTION.fullmatch(text)] == []


class Intrinsics(yaml.SafeLoader):
    """`!Ref` and the like are as good as absent."""


Intrinsics.add_multi_constructor("!", lambda *_: None)  # pyright: ignore[reportUnknownMemberType]


def descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            yield from descriptions(one)
    elif isinstance(value, dict):
        for key, one in value.items():  # pyright: ignore[reportUnknownVariableType]
            if key in ("Description", "GroupDescription"):
                yield str(one)  # pyright: ignore[reportUnknownArgumentType]
            else:
                yield from descriptions(one)


def parameters(**values: str) -> list[Any]:
    return [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()]
