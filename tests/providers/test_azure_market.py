"""Before VMs of Azure are rented: credentials, wishes that cannot be granted, prices."""

from __future__ import annotations

from pathlib import Path

import pytest
from azure.identity import ClientSecretCredential
from azure_stand import AzureCloud, user_data
from azure_stand_in import CLIENT_SECRET
from makara.manager.providers import ProviderError, Unauthenticated
from makara.manager.providers.azure.provider import AzureProvider
from makara.manager.spec.placement import Market
from provider_stands import boot_of

_UBUNTU = "Canonical:ubuntu-24_04-lts"


def signed_in(cloud: AzureCloud, secret: str) -> AzureProvider:
    credential = ClientSecretCredential(
        "11111111-0000-4000-8000-000000000000",
        "the manager",
        secret,
        authority=cloud.stand_in.address,
        disable_instance_discovery=True,
        connection_verify=str(cloud.stand_in.ca_file),
    )
    return AzureProvider(cloud.settings(), "first", user_data, credential=credential, poll_s=0.001)


def test_azures_own_sign_in_is_used(cloud: AzureCloud) -> None:
    provider = signed_in(cloud, CLIENT_SECRET)
    attempt = cloud.attempt()
    provider.create(attempt, boot_of(attempt, Path("/nowhere")))
    assert cloud.names()
    provider.close()


def test_credentials_that_azure_does_not_take_are_told_before_anything_is_rented(cloud: AzureCloud) -> None:
    provider = signed_in(cloud, "a planted secret")
    ((field, message),) = provider.check(cloud.resources())
    assert field == "provider"
    assert "does not accept the manager's credentials" in message
    assert "planted" not in message
    attempt = cloud.attempt()
    with pytest.raises(Unauthenticated):
        provider.create(attempt, boot_of(attempt, Path("/nowhere")))
    assert not cloud.account.resources
    provider.close()


def test_rights_that_are_missing_are_told(cloud: AzureCloud) -> None:
    cloud.stand_in.forbidden = True
    ((field, message),) = cloud.provider().check(cloud.resources())
    assert field == "provider"
    assert "AuthorizationFailed" in message


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"instance_type": "Standard_Nothing"}, "instance_type", "is no type that Azure has in westeurope"),
        ({"instance_type": "Standard_M8ms"}, "instance_type", "NotAvailableForSubscription"),
        ({"instance_type": "Standard_B2s"}, "instance_type", "cannot be had as a spot VM"),
        ({"instance_type": "Standard_D8s_v5", "zones": ["3"]}, "zones", "zones that have it: 1, 2"),
        ({"workers_per_node": 5}, "instance_type", "has 4 vCPUs; workers_per_node times threads is 5"),
        ({"device_memory": "17GiB"}, "instance_type", "has 16384 MiB for a worker, fewer than device_memory"),
        (
            {"instance_type": "Standard_NC4as_T4_v3", "workers_per_node": 2},
            "instance_type",
            "has 1 GPUs, fewer than workers_per_node (2)",
        ),
        ({"region": "eastus"}, "region", "is in westeurope"),
        ({"image": "ubuntu"}, "image", "neither publisher:offer:sku:version"),
        (
            {"image": f"{_UBUNTU}:desktop:latest"},
            "image",
            f"Azure has no image {_UBUNTU}:desktop:latest in west",
        ),
        (
            {"image": f"{_UBUNTU}:server:24.04.1"},
            "image",
            f"Azure has no image {_UBUNTU}:server:24.04.1 in west",
        ),
        (
            {"instance_type": "Standard_D4ps_v5"},
            "instance_type",
            f"Standard_D4ps_v5 is Arm64, but image {_UBUNTU}:server:latest is x64",
        ),
        (
            {"image": f"{_UBUNTU}:server-arm64:latest"},
            "instance_type",
            f"Standard_D4s_v5 is x64, but image {_UBUNTU}:server-arm64:latest is Arm64",
        ),
        (
            {"instance_type": "Standard_E4s_v5", "image": f"{_UBUNTU}:server-gen1:24.04.202604160"},
            "instance_type",
            "Standard_E4s_v5 boots images of generation V2, but image",
        ),
        ({"disk_gb": 29}, "disk_gb", f"29 GB, but image {_UBUNTU}:server:latest needs 30"),
        ({"image": "RedHat:RHEL:9-lvm-gen2:latest"}, "image", "is billed as Linux of redhat, whose price"),
        ({"image": "SUSE:sles-15-sp6:gen2:latest"}, "image", "is billed as Linux of suse, whose price"),
        (
            {"image": "MicrosoftWindowsServer:WindowsServer:2025-datacenter-g2:latest"},
            "image",
            "is billed as Windows, whose price",
        ),
        ({"min_nodes": 13, "max_nodes": 13}, "min_nodes", "0 of 50 are in use: ask for more quota"),
        (
            {"min_nodes": 11, "max_nodes": 13, "use_spot": False},
            "min_nodes",
            "need 44 of Azure's standardDSv5Family",
        ),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused(
    cloud: AzureCloud, changes: dict[str, object], field: str, told: str
) -> None:
    ((found, message),) = cloud.provider().check(cloud.resources(**changes))
    assert found == field
    assert told in message


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_type": "Standard_D4ps_v5", "image": f"{_UBUNTU}:server-arm64:latest"},
        {"image": f"{_UBUNTU}:server-gen1:24.04.202510010"},
        {
            "image": "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/images/of-mine",
            "disk_gb": 1,
        },
        {"disk_gb": 30},
        {"image": "RedHat:rhel-byos:rhel-lvm9-gen2:latest"},
        {"image": "SUSE:opensuse-leap-15-6:gen2:latest"},
    ],
)
def test_an_image_that_fits_is_taken(cloud: AzureCloud, changes: dict[str, object]) -> None:
    assert not cloud.provider().check(cloud.resources(**changes))


def test_a_misspelled_region_is_told_by_its_field(cloud: AzureCloud) -> None:
    ((field, message),) = cloud.provider(region="westeurop").check(cloud.resources())
    assert field == "region"
    assert message.startswith("azure.region of clouds.yaml is 'westeurop', where Azure has no types of VM")


def test_offers_are_in_the_order_in_which_they_are_tried_and_priced(cloud: AzureCloud) -> None:
    wish = cloud.resources(
        instance_type=["Standard_D8s_v5", "Standard_NC4as_T4_v3"], zones=["1", "2"], on_demand_nodes=1
    )
    offers = cloud.provider().offers(wish)
    places = [(o.placement.market, o.placement.instance_type, o.placement.zone) for o in offers]
    assert places == [
        (market, name, zone)
        for market in (Market.SPOT, Market.ON_DEMAND)
        for name in ("Standard_D8s_v5", "Standard_NC4as_T4_v3")
        for zone in ("1", "2")
    ]
    spot, on_demand = offers[0], offers[4]
    assert spot.price is not None
    assert on_demand.price is not None
    assert (spot.price.hourly, spot.price.ceiling) == (0.092, 0.46)
    assert (on_demand.price.hourly, on_demand.price.ceiling) == (0.46, 0.46)
    assert (spot.num_cpus, spot.memory_bytes, spot.num_gpus) == (8, 32 << 30, 0)
    assert offers[2].num_gpus == 1


def test_a_bid_is_the_most_that_a_spot_vm_costs(cloud: AzureCloud) -> None:
    (offer,) = cloud.provider().offers(cloud.resources(max_price=0.1))
    assert offer.price is not None
    assert offer.price.ceiling == 0.1


def test_what_has_no_price_is_offered_without_one(cloud: AzureCloud) -> None:
    (offer,) = cloud.provider().offers(cloud.resources(instance_type="Standard_E4s_v5"))
    assert offer.price is None


def test_of_several_prices_the_dearest_holds(cloud: AzureCloud) -> None:
    cloud.stand_in.more_prices = [
        ("D4s_v5", 0.9),
        ("D4s_v5 Spot", 0.5),
        ("D4s_v5", 0.1),
        ("D4s_v5 Spot", 0.01),
    ]
    (offer,) = cloud.provider().offers(cloud.resources())
    assert offer.price is not None
    assert (offer.price.hourly, offer.price.ceiling) == (0.5, 0.9)


def test_a_price_of_zero_is_no_price(cloud: AzureCloud) -> None:
    """Found: meters that Azure has set no price for yet made VMs free, so that no cap ever acted."""
    cloud.stand_in.more_prices = [("E4s_v5 Spot", 0.0)]
    (offer,) = cloud.provider().offers(cloud.resources(instance_type="Standard_E4s_v5"))
    assert offer.price is None


def test_a_bid_above_the_on_demand_price_is_that_price(cloud: AzureCloud) -> None:
    (offer,) = cloud.provider().offers(cloud.resources(max_price=9.0))
    assert offer.price is not None
    assert offer.price.ceiling == offer.on_demand


def test_a_list_that_had_no_price_is_asked_again(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    cloud.stand_in.has_prices = False
    (offer,) = provider.offers(cloud.resources())
    assert offer.price is None
    cloud.stand_in.has_prices = True
    (offer,) = provider.offers(cloud.resources())
    assert offer.price is not None


@pytest.mark.parametrize("answer", [b"<html>maintenance</html>", b"[]", b"{}", b'{"Items": null}'])
def test_an_answer_that_is_no_price_list_is_an_error_of_the_provider(
    cloud: AzureCloud, answer: bytes
) -> None:
    cloud.stand_in.prices_answer = answer
    with pytest.raises(ProviderError, match="prices cannot be had"):
        cloud.provider().offers(cloud.resources())


def test_a_spot_vm_whose_price_the_user_states_costs_the_on_demand_price_at_most(cloud: AzureCloud) -> None:
    wish = cloud.resources(instance_type="Standard_E4s_v5", hourly_price=0.1)
    (offer,) = cloud.provider().offers(wish)
    assert offer.price is not None
    assert (offer.price.hourly, offer.price.ceiling) == (0.1, 0.3)


def test_without_a_list_there_are_no_offers(cloud: AzureCloud) -> None:
    provider = cloud.provider(prices=f"{cloud.stand_in.address}/nothing")
    with pytest.raises(ProviderError, match="prices cannot be had"):
        provider.offers(cloud.resources())
