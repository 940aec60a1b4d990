"""What is particular to VMs of Azure: how they are asked for, how creations fail, what is left over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError
from azure_account import ADDRESSES, ASYNCHRONOUS, DISKS, INTERFACES, MACHINES, Failing
from azure_stand import AzureCloud, StaticCredential, user_data
from makara.manager.providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    ProviderError,
    QuotaExceeded,
    ResourceStatus,
    Throttled,
    statuses,
)
from makara.manager.providers.azure.provider import AzureProvider
from makara.manager.providers.azure.request import names_of_thing
from makara.manager.spec.placement import Attempt, Market
from makara.protocol.messages import BootConfig
from provider_stands import boot_of

IDENTITY = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/worker"
)


MANAGER = "0123456789abcdef" * 2  # as long as the names that managers give themselves


def create(provider: AzureProvider, attempt: Attempt) -> str:
    return provider.create(attempt, boot_of(attempt, Path("/nowhere")))


def machine(cloud: AzureCloud) -> dict[str, object]:
    (name,) = cloud.names()
    return cloud.account.resources[MACHINES, name]


# ---- how a VM is asked for ---------------------------------------------------------------------------------


def test_a_spot_vm_is_deleted_when_it_is_evicted_and_costs_its_bid_at_most(cloud: AzureCloud) -> None:
    create(cloud.provider(), cloud.attempt(max_price=0.05))
    asked = machine(cloud)["properties"]
    assert asked["priority"] == "Spot"
    assert asked["evictionPolicy"] == "Delete"
    assert asked["billingProfile"] == {"maxPrice": 0.05}


def test_without_a_bid_a_spot_vm_costs_the_on_demand_price_at_most(cloud: AzureCloud) -> None:
    create(cloud.provider(), cloud.attempt())
    assert machine(cloud)["properties"]["billingProfile"] == {"maxPrice": -1.0}


def test_an_on_demand_vm_says_nothing_of_eviction(cloud: AzureCloud) -> None:
    create(cloud.provider(), cloud.attempt(market=Market.ON_DEMAND))
    assert "evictionPolicy" not in machine(cloud)["properties"]


def test_interface_and_disk_go_with_their_vm_and_nothing_is_public(cloud: AzureCloud) -> None:
    create(cloud.provider(security_group_id=IDENTITY), cloud.attempt())
    asked = machine(cloud)["properties"]
    (interface,) = asked["networkProfile"]["networkInterfaceConfigurations"]
    assert interface["properties"]["deleteOption"] == "Delete"
    assert interface["properties"]["networkSecurityGroup"] == {"id": IDENTITY}
    assert asked["storageProfile"]["osDisk"]["deleteOption"] == "Delete"
    assert not cloud.names(ADDRESSES)


def test_a_public_address_is_made_only_when_asked_for_and_goes_with_its_vm(cloud: AzureCloud) -> None:
    provider = cloud.provider(public_address=True)
    create(provider, cloud.attempt())
    assert {one.kind for one in provider.list()} == {"vm", "interface", "disk", "address"}
    while not provider.release("gpt-vm0"):
        pass
    assert not cloud.account.resources


def test_the_vm_boots_what_was_rendered_in_the_zone_of_its_attempt(cloud: AzureCloud) -> None:
    attempt = cloud.attempt(zone="2").model_copy(update={"disk_gb": 90})
    create(cloud.provider(identity_id=IDENTITY, image="a:b:c:latest", disk_gb=30), attempt)
    asked = machine(cloud)
    assert cloud.account.user_data[str(asked["name"])] == user_data(attempt, boot_of(attempt, Path()))
    storage = asked["properties"]["storageProfile"]
    assert storage["imageReference"] == {"publisher": "a", "offer": "b", "sku": "c", "version": "latest"}
    assert storage["osDisk"]["diskSizeGB"] == 90
    assert asked["identity"]["userAssignedIdentities"] == {IDENTITY: {}}
    assert asked["zones"] == ["2"]


@pytest.mark.parametrize(("identity", "kind"), [(IDENTITY, "azure"), (None, "power_off")])
def test_a_vm_that_has_an_identity_deletes_itself(cloud: AzureCloud, identity: str | None, kind: str) -> None:
    boots: list[BootConfig] = []
    provider = AzureProvider(
        cloud.settings(identity_id=identity),
        "first",
        lambda attempt, boot: boots.append(boot) or b"data",
        credential=StaticCredential(),
        poll_s=0.001,
    )
    create(provider, cloud.attempt())
    provider.close()
    (boot,) = boots
    assert (boot.notices.kind, boot.ending.kind) == ("azure", kind)
    if identity is not None:
        assert boot.ending.management_url == cloud.stand_in.address
        assert boot.ending.identity_id == identity
    assert boot.store_identity.kind == "none"


def test_a_vm_has_one_identity_for_its_end_and_another_for_the_store(cloud: AzureCloud) -> None:
    boots: list[BootConfig] = []
    store = IDENTITY.removesuffix("worker") + "store"
    provider = AzureProvider(
        cloud.settings(identity_id=IDENTITY, store_identity_id=store),
        "first",
        lambda attempt, boot: boots.append(boot) or b"data",
        credential=StaticCredential(),
        poll_s=0.001,
    )
    create(provider, cloud.attempt())
    provider.close()
    assert boots[0].ending.identity_id == IDENTITY
    assert (boots[0].store_identity.kind, boots[0].store_identity.identity_id) == ("azure", store)
    (machine,) = [body for (kind, _), body in cloud.account.resources.items() if kind == MACHINES]
    assert set(machine["identity"]["userAssignedIdentities"]) == {IDENTITY, store}


def test_names_fit_and_stay_apart_whatever_the_job_is_called(cloud: AzureCloud) -> None:
    provider = cloud.provider(MANAGER, public_address=True)
    long = "j" * 63 + "-0123456789ab"
    for vm, number in ((f"{long}-vm1", 12), (f"{long}-vm2", 12), ("7" * 30, 1), ("gpt-1a2b3c-vm123", 3)):
        create(provider, cloud.attempt(vm, number))
        assert [one.vm for one in provider.look(vm, number)] == [vm] * 4
    assert len(set(cloud.names())) == 4
    assert f"gpt-1a2b3c-vm123-3-{MANAGER}" in cloud.names(), "as earlier versions called it"


def test_a_disk_without_tags_belongs_to_the_vm_whose_shortened_name_it_has(cloud: AzureCloud) -> None:
    cloud.account.tagged_disks = False
    provider, vm = cloud.provider(MANAGER), "j" * 63 + "-vm1"
    create(provider, cloud.attempt(vm))
    assert {one.vm for one in provider.list()} == {vm}
    shortened = names_of_thing(MANAGER, cloud.names(DISKS)[0], {})
    assert shortened is not None
    assert shortened.vm != vm
    assert provider.release(shortened.vm)
    assert not cloud.account.deletions, "the VM is there, and another's"
    while not provider.release(vm):
        pass
    assert not cloud.account.resources


def test_a_disk_that_is_left_is_deleted_by_its_shortened_name(cloud: AzureCloud) -> None:
    cloud.account.tagged_disks = False
    create(cloud.provider(MANAGER), cloud.attempt("j" * 63 + "-vm1"))
    cloud.account.resources.pop((MACHINES, cloud.names()[0]))
    cloud.account.resources.pop((INTERFACES, cloud.names(INTERFACES)[0]))
    provider = cloud.provider(MANAGER)  # of a manager that has lost its journal
    (left,) = provider.list()
    while not provider.release(left.vm):
        pass
    assert not cloud.account.resources


def test_nothing_is_asked_for_that_azure_would_not_take(cloud: AzureCloud) -> None:
    with pytest.raises(NotAllowed, match="image: 'ubuntu'"):
        create(cloud.provider(image="ubuntu"), cloud.attempt())
    assert not cloud.stand_in.requests


# ---- how creations end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*ASYNCHRONOUS, "SkuNotAvailable", "SpotPriceGreaterThanProvidedMaxPrice"])
def test_no_capacity_leaves_nothing(cloud: AzureCloud, code: str) -> None:
    cloud.account.failing = Failing(code)
    with pytest.raises(NoCapacity, match=code):
        create(cloud.provider(), cloud.attempt())
    assert not cloud.account.resources


def test_quota_is_told_from_other_refusals_of_the_same_code(cloud: AzureCloud) -> None:
    cloud.account.quotas["lowPriorityCores"] = (48, 50)
    with pytest.raises(QuotaExceeded, match="Current Usage: 48"):
        create(cloud.provider(), cloud.attempt())
    cloud.account.quotas["lowPriorityCores"] = (0, 50)
    cloud.account.failing = Failing("OperationNotAllowed", "the VM is marked for deletion")
    with pytest.raises(ProviderError) as caught:
        create(cloud.provider(), cloud.attempt())
    assert type(caught.value) is ProviderError


@pytest.mark.parametrize(
    "code",
    [
        "ReadOnlyDisabledSubscription",
        "ScopeLocked",
        "NotAvailableForSubscription",
        "PropertyChangeNotAllowed",
    ],
)
def test_a_conflict_with_a_code_is_a_refusal(cloud: AzureCloud, code: str) -> None:
    """Found: the same zone was asked 5,415 times, and no other."""
    cloud.account.failing = Failing(code)
    with pytest.raises(NotAllowed, match=code):
        create(cloud.provider(), cloud.attempt())


@pytest.mark.parametrize("code", ["AnotherOperationInProgress", "Conflict", "RetryableError"])
def test_a_conflict_with_what_is_under_way_passes(cloud: AzureCloud, code: str) -> None:
    cloud.account.failing = Failing(code)
    with pytest.raises(ProviderError) as caught:
        create(cloud.provider(), cloud.attempt())
    assert type(caught.value) is ProviderError


def test_what_a_failed_creation_left_is_deleted_by_name_though_no_list_has_it(cloud: AzureCloud) -> None:
    cloud.account.failing = Failing("AllocationFailed")
    cloud.account.lists_late = True
    cloud.account.tagged_disks = False
    cloud.account.reserved = 3
    with pytest.raises(NoCapacity):
        create(cloud.provider(), cloud.attempt())
    assert not cloud.account.resources
    assert {kind for kind, _ in cloud.account.deletions} == {MACHINES}


def test_an_interface_that_outlives_its_failed_vm_is_deleted_until_it_is_gone(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    cloud.account.settle()
    cloud.account.resources.pop((MACHINES, cloud.names()[0]))  # as when deletion of the parts has failed
    cloud.account.reserved = 2
    assert {one.status for one in provider.look("gpt-vm0")} == {ResourceStatus.ENDING}
    later = cloud.provider()
    with pytest.raises(NoCapacity, match="an earlier creation"):
        create(later, cloud.attempt())
    assert not cloud.account.resources
    assert cloud.account.deletions.count((INTERFACES, "gpt-vm0-1-first-nic")) > 2


def test_an_interface_that_azure_named_otherwise_is_found_by_its_tags_and_deleted(cloud: AzureCloud) -> None:
    cloud.account.suffix = "-9d41c3b0"
    provider = cloud.provider(public_address=True)
    create(provider, cloud.attempt())
    cloud.account.settle()
    cloud.account.resources.pop((MACHINES, cloud.names()[0]))
    assert {one.kind for one in provider.list()} == {"interface", "disk", "address"}
    while not provider.release("gpt-vm0"):
        cloud.account.settle()
    assert not cloud.account.resources


def test_an_address_that_is_left_is_found_though_vms_have_none_any_more(cloud: AzureCloud) -> None:
    create(cloud.provider(public_address=True), cloud.attempt())
    for kind in (MACHINES, INTERFACES, DISKS):
        cloud.account.resources.pop((kind, cloud.names(kind)[0]))
    provider = cloud.provider(public_address=False)
    assert [one.kind for one in provider.list()] == ["address"]
    assert [one.kind for one in provider.look("gpt-vm0")] == ["address"]
    while not provider.release("gpt-vm0"):
        pass
    assert not cloud.account.resources


def test_while_leftovers_stay_the_outcome_is_unknown(cloud: AzureCloud) -> None:
    cloud.account.failing = Failing("AllocationFailed")
    cloud.account.steps = 10**6
    provider = cloud.provider(patience_s=0.01)
    with pytest.raises(ProviderError, match="still being created") as caught:
        create(provider, cloud.attempt())
    assert type(caught.value) is ProviderError


def test_a_lost_answer_is_followed_by_the_next_call(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    cloud.stand_in.loses_answers_of = {"PUT"}
    with pytest.raises(ProviderError) as caught:
        create(provider, cloud.attempt())
    assert type(caught.value) is ProviderError
    assert create(provider, cloud.attempt()) == machine(cloud)["id"]
    assert len([r for r in cloud.stand_in.requests if r[0] == "PUT"]) == 1


def test_a_creation_whose_answer_was_lost_and_that_fails_says_why(cloud: AzureCloud) -> None:
    cloud.stand_in.loses_answers_of = {"PUT"}
    cloud.account.failing = Failing("OverconstrainedAllocationRequest", "constraints")
    with pytest.raises(ProviderError):
        create(cloud.provider(), cloud.attempt())
    with pytest.raises(NoCapacity, match="OverconstrainedAllocationRequest: constraints"):
        create(cloud.provider(), cloud.attempt())
    assert not cloud.account.resources


def test_the_pace_is_azures_where_it_tells_one(cloud: AzureCloud) -> None:
    """With a pace of its own of an hour this would never end."""
    cloud.stand_in.retry_after = 1
    create(cloud.provider(poll_s=3600.0, patience_s=3600.0), cloud.attempt())


def test_too_many_requests_are_not_repeated_by_the_client(cloud: AzureCloud) -> None:
    cloud.stand_in.throttled = True
    provider = cloud.provider()
    with pytest.raises(Throttled):
        provider.list()
    with pytest.raises(Throttled):
        create(provider, cloud.attempt())
    assert len(cloud.stand_in.requests) == 2


def test_a_name_that_another_has_taken_is_left_alone(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    machine(cloud)["tags"] = {"makara-manager": "somebody else"}
    with pytest.raises(NotAllowed, match="not this manager's"):
        create(cloud.provider(), cloud.attempt())
    assert "vm" not in {one.kind for one in provider.look("gpt-vm0")}


# ---- how often Azure is asked ------------------------------------------------------------------------------


def test_releases_share_lists_and_tell_each_vm_once(cloud: AzureCloud) -> None:
    cloud.stand_in.page_size = 100
    provider, vms = cloud.provider(list_s=5.0), [f"gpt-vm{n}" for n in range(5)]
    for vm in vms:
        create(provider, cloud.attempt(vm))
    cloud.account.steps = 10**6
    cloud.stand_in.requests.clear()
    for _ in range(4):
        assert not any(provider.release(vm) for vm in vms)
    made = Counter(method for method, _ in cloud.stand_in.requests)
    assert made["DELETE"] == 5
    assert made["GET"] <= 2
    cloud.account.settle()
    cloud.passed_s += 60.0
    cloud.stand_in.requests.clear()
    assert all(provider.release(vm) for vm in vms)
    assert Counter(method for method, _ in cloud.stand_in.requests) == {"GET": 3 + 4 * 5}
    assert not cloud.account.resources


def test_what_this_manager_made_is_ended_though_no_list_can_be_had(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    cloud.stand_in.lists_fail = True
    for _ in range(2):
        with pytest.raises(ProviderError, match="the list cannot be made now"):
            provider.release("gpt-vm0")
    assert Counter(method for method, _ in cloud.stand_in.requests)["DELETE"] == 1
    cloud.account.settle()
    assert not cloud.names()


@pytest.mark.parametrize("ask", ["look", "release", "console"])
def test_of_earlier_attempts_only_what_is_listed_is_asked_for_by_name(cloud: AzureCloud, ask: str) -> None:
    provider = cloud.provider(list_s=5.0)
    create(provider, cloud.attempt(number=6))
    provider.list()
    cloud.stand_in.requests.clear()
    getattr(provider, ask)("gpt-vm0", 6)
    assert len(cloud.stand_in.requests) <= 4


def test_what_an_earlier_attempt_left_is_listed_and_deleted(cloud: AzureCloud) -> None:
    create(cloud.provider(), cloud.attempt(number=2))
    cloud.account.resources.pop((MACHINES, cloud.names()[0]))
    later = cloud.provider()
    assert {(one.attempt, one.kind) for one in later.look("gpt-vm0", 6)} == {(2, "interface"), (2, "disk")}
    while not later.release("gpt-vm0", 6):
        pass
    assert not cloud.account.resources


# ---- what there is -----------------------------------------------------------------------------------------


def test_lists_have_all_pages_and_disks_without_tags(cloud: AzureCloud) -> None:
    cloud.account.tagged_disks = False
    provider = cloud.provider()
    for n in range(5):
        create(provider, cloud.attempt(f"gpt-vm{n}"))
    found = provider.list()
    assert len(found) == 15
    assert {(one.vm, one.attempt) for one in found} == {(f"gpt-vm{n}", 1) for n in range(5)}


def test_what_is_not_listed_yet_is_found_and_released_by_its_name(cloud: AzureCloud) -> None:
    cloud.account.lists_late = True
    create(cloud.provider(), cloud.attempt(number=7))
    later = cloud.provider()
    assert not later.list()
    assert {one.attempt for one in later.look("gpt-vm0", 7)} == {7}
    while not later.release("gpt-vm0", 7):
        pass
    assert not cloud.account.resources


def test_an_evicted_vm_is_gone_with_all_that_was_its_own_and_not_made_again(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    cloud.account.evict(cloud.names()[0])
    assert not cloud.account.resources
    assert not provider.look("gpt-vm0")
    with pytest.raises(Ended):
        create(provider, cloud.attempt())


def test_a_vm_that_was_shut_down_from_inside_is_billed_still(cloud: AzureCloud) -> None:
    """Azure's list of a group does not tell what a VM is doing."""
    provider = cloud.provider()
    create(provider, cloud.attempt())
    machine(cloud)["properties"]["instanceView"] = {"statuses": [{"code": "PowerState/stopped"}]}
    listed, looked = provider.list(), provider.look("gpt-vm0")
    assert statuses(listed) == {"gpt-vm0": ResourceStatus.RUNNING}
    assert {one.kind: one.shows_power for one in listed} == {"vm": False, "interface": True, "disk": True}
    assert statuses(looked) == {"gpt-vm0": ResourceStatus.ENDING}
    assert all(one.shows_power for one in looked)
    assert not any(one.taken_back for one in (*listed, *looked)), "its own code can do that"


def test_a_vm_that_azure_deletes_was_taken_since_nothing_that_runs_on_it_can_delete_it(
    cloud: AzureCloud,
) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    machine(cloud)["properties"]["provisioningState"] = "Deleting"
    for found in (provider.list(), provider.look("gpt-vm0")):
        assert {one.kind: one.taken_back for one in found}["vm"] == "Azure is deleting it"


def test_the_console_ends_with_its_last_lines(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    cloud.stand_in.console = "x" * 10_000 + " the end"
    assert provider.console("gpt-vm0").endswith("the end")
    assert len(provider.console("gpt-vm0")) == 8 << 10


def test_azure_refuses_a_list_that_is_to_tell_what_vms_do(cloud: AzureCloud) -> None:
    """As its documentation says; what no list tells is asked for by name."""
    provider = cloud.provider()
    create(provider, cloud.attempt())
    assert statuses(provider.list()) == {"gpt-vm0": ResourceStatus.RUNNING}
    with pytest.raises(HttpResponseError) as caught:
        provider._account._ask("GET", provider._account._folder("vm"), "vm", {"$expand": "instanceView"})
    assert caught.value.status_code == 400


def test_an_answer_that_cannot_be_read_leaves_the_outcome_unknown(cloud: AzureCloud) -> None:
    cloud.stand_in.answer = b"<html>maintenance</html>"
    provider = cloud.provider()
    for call in (provider.list, lambda: provider.release("gpt-vm0"), lambda: provider.look("gpt-vm0")):
        with pytest.raises(ProviderError) as caught:
            call()
        assert type(caught.value) is ProviderError


def test_a_vm_to_which_a_change_failed_runs_on(cloud: AzureCloud) -> None:
    provider = cloud.provider()
    create(provider, cloud.attempt())
    machine(cloud)["properties"]["provisioningState"] = "Failed"
    assert statuses(provider.list()) == {"gpt-vm0": ResourceStatus.RUNNING}
    assert statuses(provider.look("gpt-vm0")) == {"gpt-vm0": ResourceStatus.RUNNING}


@pytest.mark.parametrize(
    "tags", [{}, {"makara-manager": MANAGER}, {"makara-manager": MANAGER, "makara-vm": ""}]
)
def test_a_vm_whose_tags_were_removed_is_known_by_its_name(tags: dict[str, str]) -> None:
    found = names_of_thing(MANAGER, f"j-vm0-2-{MANAGER}", tags)
    assert found is not None
    assert (found.vm, found.number) == ("j-vm0", 2)
    assert names_of_thing(MANAGER, f"j-vm0-2-{MANAGER}", {"makara-manager": "another"}) is None
