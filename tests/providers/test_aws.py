"""What is particular to AWS: the request, the kinds of errors, prices, and what is refused before renting."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aws_stand import ADDRESS_HOUR, DISK_MONTH, PRICES, REGION, SPOT, TYPE, ZONES, AwsStand
from makara.manager.config import ServerConfig
from makara.manager.core.cost import price_of
from makara.manager.home import ConfigError
from makara.manager.providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    NotSold,
    Partial,
    ProviderError,
    QuotaExceeded,
    Resource,
    ResourceStatus,
    Throttled,
    Unauthenticated,
)
from makara.manager.providers.aws.checks import quota_code
from makara.manager.providers.aws.finding import resource_of
from makara.manager.providers.aws.launching import launch_request, token_of
from makara.manager.providers.aws.provider import AwsProvider
from makara.manager.providers.opening import open_providers
from makara.manager.providers.shared_answers import Cache, SharedAnswer
from makara.manager.spec.placement import Attempt, Market
from makara.protocol.messages import BootConfig
from provider_stands import boot_of

EXTRA = 100 * DISK_MONTH / 730 + ADDRESS_HOUR


def create(provider: AwsProvider, attempt: Attempt) -> str:
    return provider.create(attempt, boot_of(attempt, Path("/vms")))


def changed(attempt: Attempt, **changes: Any) -> Attempt:
    """With another placement, or other values of its own."""
    place = {key: changes.pop(key) for key in list(changes) if key in type(attempt.placement).model_fields}
    return attempt.model_copy(update={"placement": attempt.placement.model_copy(update=place), **changes})


def request(stand: AwsStand, attempt: Attempt, **changes: Any) -> dict[str, Any]:
    return launch_request(
        attempt,
        "job",
        manager="m",
        settings=stand.settings.model_copy(update=changes),
        region=stand.settings.regions[REGION],
        image="ami-1",
        root_device="/dev/xvda",
        user_data=b"data",
    )


# ---- the request -------------------------------------------------------------------------------------------


def test_a_vm_is_asked_for_by_one_request_that_names_its_manager_and_itself(stand: AwsStand) -> None:
    create(stand.aws_provider("m"), stand.attempt("vm-a"))
    (sent,) = stand.aws.requests
    assert sent["ClientToken"] == "vm-a-1.m"
    assert (sent["MinCount"], sent["MaxCount"]) == ("1", "1")
    assert base64.b64decode(sent["UserData"]) == b"#cloud-config\n# vm-a-1\n"
    assert sent["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert sent["MetadataOptions.HttpTokens"] == "required"
    assert sent["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    kinds = {value for key, value in sent.items() if key.endswith("ResourceType")}
    assert kinds == {"instance", "volume", "network-interface", "spot-instances-request"}
    assert sent["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert sent["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert "InstanceMarketOptions.SpotOptions.MaxPrice" not in sent


def test_the_bid_the_disk_and_the_profile_are_in_the_request(stand: AwsStand) -> None:
    wanted = changed(stand.attempt("vm-a"), max_price=0.25, disk_gb=40)
    made = request(stand, wanted, instance_profile="workers", public_addresses=False)
    assert made["InstanceMarketOptions"]["SpotOptions"]["MaxPrice"] == "0.25"
    assert made["BlockDeviceMappings"] == [
        {
            "DeviceName": "/dev/xvda",
            "Ebs": {"VolumeSize": 40, "VolumeType": "gp3", "DeleteOnTermination": True},
        }
    ]
    assert made["IamInstanceProfile"] == {"Name": "workers"}
    assert made["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False
    assert made["NetworkInterfaces"][0]["DeleteOnTermination"] is True


def test_the_subnet_is_that_of_the_zone(stand: AwsStand) -> None:
    subnets = stand.settings.regions[REGION].subnets
    for zone in ZONES:
        made = request(stand, changed(stand.attempt("vm-a"), zone=zone))
        assert made["NetworkInterfaces"][0]["SubnetId"] == subnets[zone]


def test_an_on_demand_vm_is_no_spot_request(stand: AwsStand) -> None:
    made = request(stand, changed(stand.attempt("vm-a"), market=Market.ON_DEMAND))
    assert "InstanceMarketOptions" not in made
    assert "spot-instances-request" not in {spec["ResourceType"] for spec in made["TagSpecifications"]}


@pytest.mark.parametrize("market", Market)
@pytest.mark.parametrize("kind", ["t2.medium", "t3.medium", "t3a.medium", "t4g.medium"])
def test_a_burstable_vm_costs_no_more_than_its_price(stand: AwsStand, kind: str, market: Market) -> None:
    create(stand.aws_provider("m"), changed(stand.attempt("vm-a"), instance_type=kind, market=market))
    (sent,) = stand.aws.requests
    assert sent["CreditSpecification.CpuCredits"] == "standard"


def test_of_other_vms_nothing_is_said_about_credits(stand: AwsStand) -> None:
    made = request(stand, changed(stand.attempt("vm-a"), instance_type="trn1.2xlarge"))
    assert "CreditSpecification" not in made


def test_tokens_fit_and_differ_between_managers_and_attempts(stand: AwsStand) -> None:
    attempts = [stand.attempt("v" * 60), stand.attempt("v" * 60, 2), stand.attempt("vm")]
    tokens = {token_of(manager, attempt) for manager in ("m" * 32, "n" * 32) for attempt in attempts}
    assert len(tokens) == 6
    assert max(map(len, tokens)) <= 64


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"region": "mars-1"}, "region mars-1: clouds.yaml has no such region; it has us-east-1"),
        ({"zone": "us-east-1f"}, "zone us-east-1f: clouds.yaml names no subnet there"),
        ({"instance_type": ""}, "names no instance type"),
        ({"image": "ami-nowhere"}, "ami-nowhere"),
    ],
)
def test_what_could_never_be_had_is_not_allowed(stand: AwsStand, changes: dict[str, str], told: str) -> None:
    with pytest.raises(NotAllowed, match=told):
        create(stand.aws_provider(), changed(stand.attempt("vm-a"), **changes))
    assert "RunInstances" not in stand.aws.calls


def test_user_data_that_is_too_long_is_not_sent(stand: AwsStand) -> None:
    stand.user_data = lambda attempt, boot: b"x" * (16385)
    with pytest.raises(NotAllowed, match="16385 bytes"):
        create(stand.aws_provider(), stand.attempt("vm-a"))
    assert "RunInstances" not in stand.aws.calls


# ---- tokens ------------------------------------------------------------------------------------------------


def test_a_repeat_with_other_bytes_finds_what_the_first_one_made(stand: AwsStand) -> None:
    first = create(stand.aws_provider(), stand.attempt("vm-a"))
    stand.user_data = lambda attempt, boot: b"#cloud-config\n# of a later version\n"
    assert create(stand.aws_provider(), stand.attempt("vm-a")) == first
    stand.end("vm-a")
    with pytest.raises(Ended):
        create(stand.aws_provider(), stand.attempt("vm-a"))


def test_while_it_is_not_listed_the_outcome_of_such_a_repeat_is_unknown(stand: AwsStand) -> None:
    first = create(stand.aws_provider(), stand.attempt("vm-a"))
    stand.user_data = lambda attempt, boot: b"#cloud-config\n# of a later version\n"
    stand.aws.hidden.add(first)
    with pytest.raises(ProviderError) as caught:
        create(stand.aws_provider(), stand.attempt("vm-a"))
    assert not isinstance(caught.value, NotAllowed | NoCapacity | Ended | Throttled)
    stand.wait()
    assert create(stand.aws_provider(), stand.attempt("vm-a")) == first


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, NoCapacity),
        ("SpotMaxPriceTooLow", 400, NotSold),
        ("InsufficientFreeAddressesInSubnet", 400, NoCapacity),
        ("Unsupported", 400, NotSold),
        ("VcpuLimitExceeded", 400, QuotaExceeded),
        ("MaxSpotInstanceCountExceeded", 400, QuotaExceeded),
        ("RequestLimitExceeded", 503, Throttled),
        ("UnauthorizedOperation", 403, NotAllowed),
        ("AuthFailure", 401, Unauthenticated),
        ("InvalidSubnetID.NotFound", 400, NotAllowed),
        ("InvalidParameterValue", 400, NotAllowed),
        ("IdempotentInstanceTerminated", 400, Ended),
        ("InternalError", 500, ProviderError),
        ("Unavailable", 503, ProviderError),
    ],
)
def test_each_code_is_of_its_kind(stand: AwsStand, code: str, status: int, kind: type[ProviderError]) -> None:
    stand.aws.refusal = (code, status)
    with pytest.raises(ProviderError, match=f"create vm-a-1: {code}: told by the stand") as caught:
        create(stand.aws_provider(), stand.attempt("vm-a"))
    assert type(caught.value) is kind


# ---- what is left over, and lists --------------------------------------------------------------------------


def test_disks_and_interfaces_without_a_vm_are_listed_and_deleted(stand: AwsStand) -> None:
    backend, provider = stand.aws.ec2, stand.aws_provider("m")
    tags = {"makara:manager": "m", "makara:vm": "vm-a", "makara:attempt": "1"}
    disk = backend.create_volume(size=8, zone_name=ZONES[0])
    interface = backend.create_network_interface(stand.settings.regions[REGION].subnets[ZONES[0]], None)
    backend.create_tags([disk.id, interface.id], tags)
    expected = Resource(vm="vm-a", attempt=1, id=disk.id, status=ResourceStatus.ENDING, kind="disk")
    assert list(provider.list()) == [expected, replace(expected, id=interface.id, kind="interface")]
    assert not provider.release("vm-a")
    stand.wait()
    assert provider.release("vm-a")
    assert not stand.billed()


@pytest.mark.parametrize("tags", [{}, {"makara:vm": "vm-a", "makara:attempt": "first"}])
def test_what_has_odd_tags_holds_up_nothing_else(stand: AwsStand, tags: dict[str, str]) -> None:
    backend, provider = stand.aws.ec2, stand.aws_provider("m")
    disk = backend.create_volume(size=8, zone_name=ZONES[0])
    interface = backend.create_network_interface(stand.settings.regions[REGION].subnets[ZONES[0]], None)
    backend.create_tags([disk.id, interface.id], {"makara:manager": "m", **tags})
    create(provider, stand.attempt("vm-b"))
    assert {(one.vm, one.attempt) for one in provider.list()} == {
        (vm, 1) for vm in ("vm-b", *tags.values()) if vm.startswith("vm")
    }
    stand.wait()
    for vm in ("vm-a", "vm-b"):
        provider.release(vm)
        stand.wait()
        assert provider.release(vm)
    assert set(stand.billed()) <= {""}, "what tells no VM is left alone"


def test_an_instance_that_tells_no_vm_is_left_alone(stand: AwsStand) -> None:
    provider = stand.aws_provider("m")
    made = create(provider, stand.attempt("vm-a"))
    stand.aws.ec2.delete_tags([made], {"makara:vm": "vm-a"})
    stand.wait()
    assert [one.kind for one in provider.list()] == []


def test_a_state_that_is_not_known_is_not_gone() -> None:
    raw = {"InstanceId": "i-1", "State": {"Name": "hibernating"}, "Tags": []}
    assert resource_of(raw).status is ResourceStatus.PENDING


@pytest.mark.parametrize(
    ("state", "code", "message", "said"),
    [
        (
            "terminated",
            "Server.SpotInstanceTermination",
            "Server.SpotInstanceTermination: capacity",
            "as it is",
        ),
        ("shutting-down", "Client.VolumeLimitExceeded", "Volume limit exceeded", "with its code"),
        ("terminated", "Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: shut down", ""),
        ("terminated", "Client.InstanceInitiatedShutdown", "Instance initiated shutdown", ""),
        ("running", "Server.SomethingOfBefore", "", ""),
    ],
)
def test_why_aws_itself_ended_an_instance_is_told(state: str, code: str, message: str, said: str) -> None:
    reason = {"Code": code, "Message": message}
    raw = {"InstanceId": "i-1", "State": {"Name": state}, "StateReason": reason, "Tags": []}
    expected = {"as it is": message, "with its code": f"{code}: {message}"}.get(said, "")
    assert resource_of(raw).taken_back == expected


@pytest.mark.parametrize(
    ("state", "reason", "ran_s"),
    [
        ("terminated", "User initiated (2026-11-28 04:10:30 GMT)", 630.0),
        ("terminated", "User initiated (2026-11-28 04:10:30 UTC)", 630.0),
        ("terminated", "User initiated (2026-11-28 03:59:00 GMT)", None),
        ("terminated", "Server.InternalError", None),
        ("running", "User initiated (2026-11-28 04:10:30 GMT)", None),
    ],
)
def test_for_how_long_a_terminated_instance_ran_is_told(state: str, reason: str, ran_s: float | None) -> None:
    raw = {
        "InstanceId": "i-1",
        "State": {"Name": state},
        "StateTransitionReason": reason,
        "LaunchTime": datetime(2026, 11, 28, 4, 0, 0, tzinfo=UTC),
        "Tags": [],
    }
    assert resource_of(raw).ran_s == ran_s


# ---- what was done to its tags -----------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [("makara:vm",), ("makara:manager", "makara:vm", "makara:attempt")])
@pytest.mark.parametrize("same_manager", [True, False])
def test_an_instance_whose_tags_were_removed_is_known_by_its_token(
    stand: AwsStand, tags: tuple[str, ...], same_manager: bool
) -> None:
    """Found: it was taken as released, and ran on."""
    provider = stand.aws_provider("m")
    made = create(provider, stand.attempt("vm-a", number=2))
    stand.aws.ec2.delete_tags([made], dict.fromkeys(tags))
    stand.wait()
    if not same_manager:
        provider = stand.aws_provider("m")
        stand.wait()
    (seen,) = provider.look("vm-a", 2)
    assert (seen.vm, seen.attempt, seen.id, seen.status) == ("vm-a", 2, made, ResourceStatus.RUNNING)
    assert not provider.release("vm-a", 2)
    stand.wait()
    assert stand.aws.ec2.get_instance(made).state == "terminated"
    assert provider.release("vm-a", 2)


# ---- regions -----------------------------------------------------------------------------------------------

FAR = "ap-east-1"


@pytest.fixture
def two_regions(stand: AwsStand) -> AwsProvider:
    """The second of which AWS does not let this account use."""
    regions = {**stand.settings.regions, FAR: stand.settings.regions[REGION]}
    stand.aws.allows = lambda authorization, action, form: FAR not in authorization
    return stand.aws_provider("m", regions=regions)


def test_a_region_that_cannot_be_asked_holds_up_no_release_in_another(
    stand: AwsStand, two_regions: AwsProvider
) -> None:
    create(two_regions, stand.attempt("vm-a"))
    assert not two_regions.release("vm-a")
    stand.wait()
    assert two_regions.release("vm-a")
    assert not stand.billed()


def test_the_next_manager_releases_in_one_region_though_another_cannot_be_asked(
    stand: AwsStand, two_regions: AwsProvider
) -> None:
    create(stand.aws_provider("m"), stand.attempt("vm-a"))
    stand.wait()
    assert not two_regions.release("vm-a")
    stand.wait()
    assert two_regions.release("vm-a")
    assert not stand.billed()


def test_of_a_vm_that_may_be_in_a_region_that_cannot_be_asked_nothing_is_known(
    stand: AwsStand, two_regions: AwsProvider
) -> None:
    stand.wait()
    for call in (two_regions.release, two_regions.look, two_regions.console):
        with pytest.raises(ProviderError, match="UnauthorizedOperation"):
            call("vm-never")


@pytest.mark.parametrize("code", ["AuthFailure", "OptInRequired"])
def test_a_region_that_is_not_enabled_is_not_told_as_wrong_credentials(stand: AwsStand, code: str) -> None:
    """Found: "AWS takes no request: credentials: ..."."""
    regions = {**stand.settings.regions, FAR: stand.settings.regions[REGION]}
    stand.aws.allows = lambda authorization, action, form: FAR not in authorization
    stand.aws.not_allowed = (code, 401)
    provider = stand.aws_provider("m", regions=regions)
    ((field, message),) = provider.check(stand.resources(region=FAR, image=stand.image))
    assert field == "region"
    assert "not enabled for this account" in message
    there = stand.attempt("vm-a")
    there = there.model_copy(update={"placement": there.placement.model_copy(update={"region": FAR})})
    with pytest.raises(NotAllowed, match="not enabled for this account"):
        create(provider, there)
    with pytest.raises(Partial, match="not enabled for this account"):
        provider.list()


def test_credentials_that_are_wrong_everywhere_are_told_as_such(stand: AwsStand) -> None:
    regions = {**stand.settings.regions, FAR: stand.settings.regions[REGION]}
    stand.aws.expired = True
    provider = stand.aws_provider("m", regions=regions)
    ((field, message),) = provider.check(stand.resources(region=FAR, image=stand.image))
    assert field == "provider"
    assert "not enabled" not in message


def test_a_list_without_one_region_says_so_and_has_the_others(
    stand: AwsStand, two_regions: AwsProvider
) -> None:
    create(two_regions, stand.attempt("vm-a"))
    with pytest.raises(Partial, match=f"list VMs in {FAR}") as caught:
        two_regions.list()
    assert [one.vm for one in caught.value.found] == ["vm-a"]


def test_a_list_is_shared_for_some_seconds(stand: AwsStand) -> None:
    stand.now = lambda: 1e9  # time does not pass by itself
    provider = stand.aws_provider()
    for _ in range(20):
        provider.list()
    assert stand.aws.calls.count("DescribeInstances") == 1
    stand.passed_s += 6.0
    provider.list()
    assert stand.aws.calls.count("DescribeInstances") == 2
    assert stand.aws.calls.count("DescribeVolumes") == 1
    create(provider, stand.attempt("vm-a"))
    assert [resource.vm for resource in provider.list()] == ["vm-a"]


def test_vms_that_are_released_together_share_lists_and_are_ended_once(stand: AwsStand) -> None:
    stand.now = lambda: 1e9
    stand.aws.page_size = None
    provider, vms = stand.aws_provider(), [f"vm-{number}" for number in range(5)]
    for vm in vms:
        create(provider, stand.attempt(vm))
    stand.aws.calls.clear()
    for _ in range(4):
        assert not any(provider.release(vm) for vm in vms)
    assert Counter(stand.aws.calls) == {"DescribeInstances": 1, "TerminateInstances": 5}
    stand.wait()
    assert all(provider.release(vm) for vm in vms)
    looked = {"DescribeInstances": 2, "DescribeVolumes": 1, "DescribeNetworkInterfaces": 1}
    assert Counter(stand.aws.calls) == {**looked, "TerminateInstances": 5}
    assert not stand.billed()


def test_what_is_asked_for_while_something_changes_is_not_kept() -> None:
    changed: list[SharedAnswer[int]] = []
    answers = iter(range(9))

    def ask() -> int:
        for one in changed:
            one.forget()
        changed.clear()
        return next(answers)

    shared = SharedAnswer(ask, lambda: 5.0)
    changed.append(shared)
    assert [shared.get(since=0.0) for _ in range(3)] == [(5.0, 0), (5.0, 1), (5.0, 1)]
    assert shared.get(since=6.0) == (5.0, 2)


def test_a_list_from_before_the_clock_was_set_back_is_not_shared() -> None:
    times, answers = iter([100.0, 40.0, 40.0]), iter(range(9))
    shared = SharedAnswer(lambda: next(answers), lambda: next(times))
    assert shared.get(since=95.0) == (100.0, 0)
    assert shared.get(since=35.0) == (40.0, 1)


class Turnstile:
    """A lock that tells how many came to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.came = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_those_who_wait_for_a_list_that_fails_do_not_ask_one_after_another() -> None:
    asked: list[str] = []
    turnstile = Turnstile()

    def ask() -> list[str]:
        asked.append("once more")
        for _ in range(4):
            assert turnstile.came.acquire(timeout=30.0)
        raise ProviderError("read timed out")

    shared = SharedAnswer(ask, lambda: 5.0)
    shared._asking = turnstile  # type: ignore[assignment]
    with ThreadPoolExecutor(4) as threads:
        failed = [threads.submit(shared.get, since=0.0).exception for _ in range(4)]
        assert {str(exception()) for exception in failed} == {"read timed out"}
    assert asked == ["once more"]
    shared._ask = lambda: ["at last"]
    assert shared.get(since=0.0) == (5.0, ["at last"]), "who comes later asks anew"


def test_a_cache_keeps_nothing_of_what_failed() -> None:
    """Found: each misspelt name stayed, with the error and all that its frames held."""

    def ask(name: str) -> str:
        raise ProviderError(f"no image {name}")

    cache = Cache(ask, lambda: 5.0, 60.0)
    with pytest.raises(ProviderError, match="no image x"):
        cache.get("x")
    assert not cache._answers


def test_a_failure_discards_no_answer_that_came_after_it() -> None:
    """Found: who was told late of a failure discarded the good answer that another had got since."""
    asked: list[str] = []

    def ask(name: str) -> str:
        asked.append(name)
        if len(asked) == 1:
            cache.forget(name)
            assert cache.get(name) == (5.0, "good")
            raise ProviderError("told late")
        return "good"

    cache = Cache(ask, lambda: 5.0, 60.0)
    with pytest.raises(ProviderError, match="told late"):
        cache.get("x")
    assert cache.get("x") == (5.0, "good")
    assert len(asked) == 2


@pytest.mark.parametrize("regions", [(), (FAR,)])
def test_what_this_manager_made_is_ended_though_no_list_can_be_had(
    stand: AwsStand, regions: tuple[str, ...]
) -> None:
    places = {**dict.fromkeys(regions, stand.settings.regions[REGION]), **stand.settings.regions}
    provider = stand.aws_provider(regions=places)
    create(provider, stand.attempt("vm-a"))
    stand.aws.allows = lambda authorization, action, form: not action.startswith("Describe")
    stand.aws.calls.clear()
    with pytest.raises(ProviderError, match="UnauthorizedOperation"):
        provider.release("vm-a")
    assert Counter(stand.aws.calls) == {"TerminateInstances": 1, "DescribeInstances": 1}, "of one region"
    stand.wait()
    assert not stand.billed()


# ---- prices ------------------------------------------------------------------------------------------------


def test_spot_prices_are_those_of_now_in_each_zone_up_to_the_on_demand_price(stand: AwsStand) -> None:
    offers = stand.aws_provider().offers(stand.resources())
    assert {o.placement.zone: o.price.hourly for o in offers} == pytest.approx(
        {zone: price + EXTRA for zone, price in SPOT.items()}
    )
    assert [o.price.ceiling for o in offers] == pytest.approx([PRICES[TYPE] + EXTRA] * 2)
    assert {(o.num_cpus, o.num_gpus) for o in offers} == {(4, 1)}


def test_the_bid_is_the_ceiling(stand: AwsStand) -> None:
    offers = stand.aws_provider().offers(stand.resources(max_price=0.3, zones=[ZONES[1]]))
    assert [o.placement.zone for o in offers] == [ZONES[1]]
    assert offers[0].price.ceiling == pytest.approx(0.3 + EXTRA)


def test_on_demand_vms_are_offered_last_and_only_where_they_are_wanted(stand: AwsStand) -> None:
    offers = stand.aws_provider().offers(stand.resources(on_demand_nodes=1))
    markets = [o.placement.market for o in offers]
    assert markets == [Market.SPOT, Market.SPOT, Market.ON_DEMAND, Market.ON_DEMAND]
    alone = stand.aws_provider().offers(stand.resources(use_spot=False))
    assert {o.placement.market for o in alone} == {Market.ON_DEMAND}
    assert alone[0].price.hourly == alone[0].price.ceiling == pytest.approx(PRICES[TYPE] + EXTRA)


def test_where_aws_names_no_price_the_stated_one_holds_and_without_one_there_is_none(stand: AwsStand) -> None:
    stand.aws.listed.clear()
    provider = stand.aws_provider()
    assert {o.price for o in provider.offers(stand.resources(use_spot=False))} == {None}
    wish = stand.resources(use_spot=False, hourly_price=0.7)
    (stated,) = {price_of(wish, offer, 1.0).hourly for offer in provider.offers(wish)}
    assert stated == 0.7
    bids = [o.price.ceiling for o in provider.offers(stand.resources(max_price=0.4))]
    assert bids == pytest.approx([0.4 + EXTRA] * 2)


@pytest.mark.parametrize(("bid", "ceiling"), [(3.0, 3.0), (None, 4.0), (9.0, 4.0)])
def test_a_spot_vm_whose_price_the_user_states_costs_its_bid_or_the_on_demand_price_at_most(
    stand: AwsStand, bid: float | None, ceiling: float
) -> None:
    stand.aws.listed[TYPE] = 4.0
    stand.aws.history.clear()
    wish = stand.resources(hourly_price=1.0, max_price=bid)
    prices = [price_of(wish, offer, 1.0) for offer in stand.aws_provider().offers(wish)]
    assert [price.hourly for price in prices] == [1.0] * 2
    assert [price.ceiling for price in prices] == pytest.approx([ceiling + EXTRA] * 2)


def test_a_price_of_zero_is_no_price(stand: AwsStand) -> None:
    stand.aws.history = dict.fromkeys(SPOT, 0.0)
    assert {offer.price for offer in stand.aws_provider().offers(stand.resources())} == {None}


def test_without_a_price_of_aws_a_spot_vm_costs_its_bid_at_most(stand: AwsStand) -> None:
    stand.aws.listed.clear()
    stand.aws.history.clear()
    wish = stand.resources(hourly_price=1.0, max_price=3.0)
    for offer in stand.aws_provider().offers(wish):
        price = price_of(wish, offer, 1.0)
        assert price.hourly == 1.0
        assert price.ceiling >= 3.0


# ---- before renting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"region": "mars-1"}, "region", "this manager has no region mars-1; clouds.yaml has us-east-1"),
        ({"zones": ["us-east-1f"]}, "zones", "us-east-1f: clouds.yaml names no subnet there"),
        ({"image": "ami-nowhere"}, "image", "ami-nowhere"),
        ({"instance_type": "g4dn.huge"}, "instance_type", "g4dn.huge"),
        ({"instance_type": "t4g.small"}, "instance_type", "t4g.small is arm64, but image"),
        ({"workers_per_node": 2}, "instance_type", "has 1 GPUs, fewer than workers_per_node (2)"),
        ({"device_memory": "40GiB"}, "instance_type", "MiB for a worker, fewer than device_memory"),
        (
            {"min_nodes": 17, "max_nodes": 20},
            "instance_type",
            "17 g4dn.xlarge have 68 vCPUs, and quota L-3819A6DF",
        ),
        ({"disk_gb": 1}, "disk_gb", "1 GB, but image"),
    ],
)
def test_each_fault_is_told_with_its_field(
    stand: AwsStand, changes: dict[str, Any], field: str, told: str
) -> None:
    faults = stand.aws_provider().check(stand.resources(**changes))
    assert [name for name, _ in faults] == [field]
    assert told in faults[0][1]
    assert not stand.billed()


@pytest.mark.parametrize("platform", ["Red Hat Enterprise Linux", "SUSE Linux", "Windows", "Ubuntu Pro"])
def test_an_image_with_a_licence_fee_is_refused(stand: AwsStand, platform: str) -> None:
    """Its price was that of Linux, and no cap held."""
    stand.aws.platform = platform
    ((field, told),) = stand.aws_provider().check(stand.resources())
    assert field == "image"
    assert f"{stand.image} is billed as {platform}, whose price is not known here" in told


def test_an_account_without_a_quota_of_its_own_has_the_default_one(
    stand: AwsStand, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: every submission was refused, for a right that was there."""
    stand.aws.quota, stand.aws.default_quota = None, 8.0
    wish = stand.resources(min_nodes=3, max_nodes=3)
    ((field, told),) = stand.aws_provider().check(wish)
    assert field == "instance_type"
    assert "12 vCPUs, and quota L-3819A6DF (vCPUs) of us-east-1 is 8" in told
    stand.aws.default_quota = None
    assert stand.aws_provider().check(wish) == []
    assert "L-3819A6DF: AWS knows none in us-east-1, so that it was not checked" in caplog.text


class Names:
    """A resolver that knows one region's name."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.asked: list[str] = []

    def __call__(self, host: str, port: None) -> list[str]:
        self.asked.append(host)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [host]


def open_region(region: str, stand: AwsStand, home: Path) -> None:
    there = stand.settings.regions[REGION].model_dump()
    (home / "clouds.yaml").write_text(yaml.safe_dump({"aws": {"regions": {REGION: there, region: there}}}))
    providers = open_providers(ServerConfig(home=home, port=0), "m", lambda attempt, boot: b"")
    for provider in providers.values():
        provider.close()


@pytest.mark.parametrize(
    ("region", "meant"),
    [
        ("us-eats-1", "; did you mean us-east-1?"),
        ("mars", ""),
        ("us east", "; did you mean us-east-2?"),
    ],
)
def test_a_manager_does_not_begin_with_a_region_that_aws_does_not_have(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: str, meant: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names())
    with pytest.raises(ConfigError) as caught:
        open_region(region, stand, tmp_path)
    told = str(caught.value)
    assert told == f"clouds.yaml: aws.regions.{region}: AWS has no region of this name{meant}"


def test_a_region_that_the_library_does_not_know_yet_is_taken_if_it_has_an_address(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names("ec2.us-north-9.amazonaws.com")
    monkeypatch.setattr(socket, "getaddrinfo", names)
    open_region("us-north-9", stand, tmp_path)
    assert names.asked == list(names.known), "those that it knows are not asked for"


def test_expired_credentials_are_told(stand: AwsStand) -> None:
    stand.aws.expired = True
    (fault,) = stand.aws_provider().check(stand.resources())
    assert fault[0] == "provider"
    assert "ExpiredToken" in fault[1]


@pytest.mark.parametrize(
    ("instance_type", "market", "code"),
    [
        ("m7i.large", Market.SPOT, "L-34B43A08"),
        ("im4gn.large", Market.ON_DEMAND, "L-1216C47A"),
        ("p4d.24xlarge", Market.SPOT, "L-7212CCBC"),
        ("p5.48xlarge", Market.SPOT, None),
        ("p5.48xlarge", Market.ON_DEMAND, "L-417A185B"),
        ("trn1.2xlarge", Market.SPOT, None),
    ],
)
def test_each_family_has_its_quota(instance_type: str, market: Market, code: str | None) -> None:
    assert quota_code(instance_type, market) == code


# ---- opening -----------------------------------------------------------------------------------------------


def write_settings(stand: AwsStand, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    region = stand.settings.regions[REGION].model_dump()
    settings = {"aws": {"regions": {REGION: region}, "endpoint_url": stand.endpoint}}
    (home / "clouds.yaml").write_text(str(settings).replace("'", '"'))


def test_the_section_of_the_settings_opens_the_provider(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(stand, tmp_path, monkeypatch)
    providers = open_providers(ServerConfig(home=tmp_path), "m", lambda attempt, boot: b"data")
    attempt = stand.attempt("vm-a")
    assert providers["aws"].create(attempt, boot_of(attempt, tmp_path))
    assert stand.billed()
    for provider in providers.values():
        provider.close()


def test_prices_are_dated_by_the_managers_clock(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(stand, tmp_path, monkeypatch)
    config = ServerConfig(home=tmp_path)
    providers = open_providers(config, "m", lambda attempt, boot: b"data", lambda: 5000.0)
    offers = providers["aws"].offers(stand.resources())
    assert {offer.price.at for offer in offers if offer.price is not None} == {5000.0}
    for provider in providers.values():
        provider.close()


def test_a_profile_that_is_not_there_is_a_fault_of_the_settings(
    stand: AwsStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    region = stand.settings.regions[REGION].model_dump()
    (tmp_path / "clouds.yaml").write_text(str({"aws": {"regions": {REGION: region}}}).replace("'", '"'))
    with pytest.raises(ConfigError, match=r"clouds.yaml: aws: .*nobody"):
        open_providers(ServerConfig(home=tmp_path), "m", lambda attempt, boot: b"data")


def test_a_vm_is_told_how_it_hears_of_its_end_and_how_it_ends(stand: AwsStand, tmp_path: Path) -> None:
    boots: list[BootConfig] = []
    stand.user_data = lambda attempt, boot: boots.append(boot) or b"data"
    attempt = stand.attempt("vm-a")
    stand.provider().create(attempt, boot_of(attempt, tmp_path))
    (boot,) = boots
    assert (boot.notices.kind, boot.ending.kind, boot.store_identity.kind) == ("aws", "power_off", "aws")
    assert stand.aws.requests[0]["InstanceInitiatedShutdownBehavior"] == "terminate"


def test_a_manager_without_that_section_imports_nothing_of_it() -> None:
    code = "import sys, makara.manager.server; print('makara.manager.providers.aws' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
