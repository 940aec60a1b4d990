"""The `resources` of a job file: what clouds are asked for, and what a mistake there is answered with."""

from __future__ import annotations

from typing import Any

import pytest
from makara.manager.spec.job_spec import JobSpecError, Resources, parse_spec

AWS: dict[str, Any] = {"provider": "aws", "max_nodes": 4, "instance_type": "c7i.large"}
BOTH: dict[str, Any] = {
    "provider": ["aws", "azure"],
    "max_nodes": 4,
    "instance_type": ["c7i.large", "Standard_D2s_v5", "m7i.large"],
}


def resources(**fields: Any) -> Resources:
    spec = {
        "name": "gpt",
        "entrypoint": "train:build",
        "resources": fields,
        "training": {"global_batch_size": 8, "steps": 2},
        "checkpoint": {"uri": "file:///tmp/c"},
    }
    return parse_spec(parse_spec(spec).model_dump(mode="json")).resources  # as the journal keeps it


def test_one_provider_takes_plain_values() -> None:
    found = resources(**AWS, region="eu-west-1", zones=["eu-west-1b", "eu-west-1a"], image="ami-1")
    assert found.providers == ("aws",)
    assert found.region_of("aws") == "eu-west-1"
    assert found.zones_of("aws") == ("eu-west-1b", "eu-west-1a")
    assert found.image_of("aws") == "ami-1"
    assert found.types_of("aws") == ("c7i.large",)


def test_several_clouds_have_values_of_their_own_in_the_order_of_the_file() -> None:
    found = resources(**BOTH, region={"aws": "eu-west-1", "azure": "westeurope"}, zones={"azure": ["2", "1"]})
    assert found.providers == ("aws", "azure")
    assert found.types_of("aws") == ("c7i.large", "m7i.large")
    assert found.types_of("azure") == ("Standard_D2s_v5",)
    assert (found.region_of("aws"), found.region_of("azure")) == ("eu-west-1", "westeurope")
    assert (found.zones_of("aws"), found.zones_of("azure")) == ((), ("2", "1"))


def test_clouds_give_spot_vms_unless_told_otherwise() -> None:
    assert resources(**AWS).spot
    assert not resources(**AWS, use_spot=False).spot
    assert not resources(provider="local", max_nodes=1).spot


def test_on_demand_vms_stand_in_after_ten_minutes_unless_told_otherwise() -> None:
    assert resources(**AWS, on_demand_nodes=1).on_demand_after_s == 600
    assert resources(**AWS, on_demand_nodes=1, on_demand_after="90s").on_demand_after_s == 90


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"provider": []}, "provider", "expected a text or a list of texts, got []"),
        ({"provider": 7}, "provider", "expected a text or a list of texts, got 7"),
        (BOTH | {"provider": ["aws", "gcp"]}, "provider", "unknown provider 'gcp'; expected local, static"),
        (BOTH | {"provider": ["aws", "aws", "azure"]}, "provider", "aws is named twice"),
        (BOTH | {"provider": ["aws", "local"]}, "provider", "local goes with no other"),
        ({"provider": "local", "budget": 5.0}, "budget", "no meaning with provider local; leave it out"),
        ({"provider": "static", "use_spot": True}, "use_spot", "no meaning with provider static"),
        ({"provider": "local", "on_demand_nodes": 1}, "on_demand_nodes", "no meaning with provider local"),
        ({"provider": "aws"}, "instance_type", "none is one of aws, and at least one is needed"),
        (BOTH | {"instance_type": "c7i.large"}, "instance_type", "none is one of azure"),
        (AWS | {"instance_type": ["c7i.large", "Basic_A1"]}, "instance_type", "Basic_A1 is one of azure"),
        (BOTH | {"region": "eu-west-1"}, "region", "one for each is expected: {aws: ...}"),
        (BOTH | {"zones": ["1"]}, "zones", "one for each is expected"),
        (AWS | {"region": {"azure": "westeurope"}}, "region", "'azure' is no cloud of resources.provider"),
        (AWS | {"region": 3}, "region", "expected a text, or a text for each provider, got 3"),
        (
            AWS | {"zones": "a"},
            "zones",
            "expected a list of texts, or such a list for each provider, got 'a'",
        ),
        (AWS | {"max_price": 0}, "max_price", "greater than 0"),
        (AWS | {"budget": float("inf")}, "budget", "finite"),
        (AWS | {"use_spot": False, "max_price": 0.1}, "max_price", "no meaning with use_spot: false"),
        (AWS | {"max_price": 2.0, "max_hourly_cost": 1.5}, "max_price", "2 is more than resources.max_hour"),
        (AWS | {"on_demand_nodes": 5}, "on_demand_nodes", "5 is more than resources.max_nodes (4)"),
        (AWS | {"on_demand_after": "5m"}, "on_demand_after", "no effect without on_demand_nodes"),
        (AWS | {"on_demand_nodes": 1, "on_demand_after": 5}, "on_demand_after", "5 is no time; expected"),
        (AWS | {"disk_gb": 0}, "disk_gb", "greater than or equal to 1"),
    ],
)
def test_each_fault_names_its_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(JobSpecError) as caught:
        resources(**({"max_nodes": 4} | fields))
    told = dict(caught.value.errors)
    assert list(told) == [f"resources.{field}"]
    assert says in told[f"resources.{field}"]
