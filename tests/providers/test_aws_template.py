"""What the CloudFormation template makes is what the settings take."""

from __future__ import annotations

from pathlib import Path

import boto3
import yaml
from aws_stand import REGION, aws_stand
from makara.manager.providers.settings import AwsSettings
from provider_stands import boot_of
from repository import ROOT


def test_a_vm_is_made_in_what_the_template_made(tmp_path: Path) -> None:
    with aws_stand(tmp_path) as stand:
        session = boto3.Session(aws_access_key_id="id", aws_secret_access_key="key", region_name=REGION)
        clouds = session.client("cloudformation", endpoint_url=stand.endpoint)
        clouds.create_stack(
            StackName="makara",
            TemplateBody=(ROOT / "deploy" / "aws" / "network.yaml").read_text(),
            Parameters=[{"ParameterKey": "Bucket", "ParameterValue": "checkpoints"}],
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
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
