"""The roles in deploy/azure are what manager and workers need, each where it holds, and no more."""

from __future__ import annotations

import re
from pathlib import Path

from azure_stand import AzureCloud
from provider_stands import boot_of
from repository import ROOT

_NETWORK = "/subscriptions/s/resourceGroups/net/providers/Microsoft.Network"
_IDENTITY = "/subscriptions/s/resourceGroups/net/providers/Microsoft.ManagedIdentity/userAssignedIdentities/w"
_TYPES = r"Microsoft\.(?:Compute/(?:virtualMachines|disks)|Network/(?:networkInterfaces|publicIPAddresses))"
_VERBS = {"GET": "read", "PUT": "write", "DELETE": "delete"}

# What the creation of a VM asks for besides: for what is made with it, and for what it is put into. After
# learn.microsoft.com: role-based-access-control/permissions/compute and .../networking, and
# virtual-network/virtual-network-network-interface, "Permissions".
_MADE_WITH_IT = {
    "Microsoft.Compute/disks/write",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/publicIPAddresses/join/action",
}
_PUT_INTO = {
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
}


def roles() -> dict[str, set[str]]:
    """The actions of each role that the template defines."""
    text = (ROOT / "deploy" / "azure" / "manager.bicep").read_text()
    found = re.findall(r"roleName: '\$\{name\} (\w+)'.*?actions: \[(.*?)\]", text, re.S)
    return {role: set(re.findall(r"'([^']+)'", actions)) for role, actions in found}


def rights(method: str, path: str) -> set[str]:
    """Those that a call asks for by itself."""
    asked = path.rpartition("/providers/")[2]
    if asked.endswith("/retrieveBootDiagnosticsData"):
        return {"Microsoft.Compute/virtualMachines/retrieveBootDiagnosticsData/action"}
    if match := re.fullmatch(rf"({_TYPES})(?:/[^/]+)?", asked):
        found = {f"{match[1]}/{_VERBS[method]}"}
        looks = method == "GET" and match[1].endswith("virtualMachines")
        return found | ({f"{match[1]}/instanceView/read"} if looks else set())  # they ask for it with the VM
    if re.fullmatch(r"Microsoft\.Compute/locations/[^/]+/publishers/.*/versions(?:/[^/]+)?", asked):
        return {"Microsoft.Compute/locations/publishers/artifacttypes/offers/skus/versions/read"}
    if match := re.fullmatch(r"Microsoft\.Compute/(?:locations/[^/]+/)?(\w+)(?:/[^/]+)?", asked):
        return {f"Microsoft.Compute/{'locations/' if 'locations' in asked else ''}{match[1]}/read"}
    raise AssertionError(f"{method} {path}")


def test_the_roles_of_a_manager_hold_what_it_asks_for_and_nothing_else(
    cloud: AzureCloud, tmp_path: Path
) -> None:
    provider = cloud.provider(
        public_address=True, identity_id=_IDENTITY, security_group_id=f"{_NETWORK}/networkSecurityGroups/w"
    )
    attempt = cloud.attempt()
    assert list(provider.check(cloud.resources())) == []
    provider.offers(cloud.resources())
    provider.create(attempt, boot_of(attempt, tmp_path))
    provider.console("gpt-vm0")
    provider.list()
    cloud.account.resources.pop(("Microsoft.Compute/virtualMachines", cloud.names()[0]))
    while not provider.release("gpt-vm0"):  # interface, disk and address are left, and go by their names
        pass
    other = cloud.attempt("gpt-vm1")
    provider.create(other, boot_of(other, tmp_path))
    while not provider.release("gpt-vm1"):
        pass
    calls = {call for call in cloud.stand_in.requests if "/providers/" in call[1]}
    on_group = [call for call in calls if "/resourceGroups/" in call[1]]
    on_subscription = [call for call in calls if "/resourceGroups/" not in call[1]]
    defined = roles()
    assert defined["renter"] == _MADE_WITH_IT.union(*(rights(*call) for call in on_group))
    assert defined["shopper"] == set[str]().union(*(rights(*call) for call in on_subscription))
    assert defined["attacher"] == _PUT_INTO


def test_a_worker_may_delete_vms_and_nothing_else() -> None:
    assert roles()["leaver"] == {"Microsoft.Compute/virtualMachines/delete"}


def test_each_role_holds_where_its_calls_go() -> None:
    text = (ROOT / "deploy" / "azure" / "manager.bicep").read_text()
    modules = re.findall(
        r"module \w+ 'right.bicep' = \{.*?scope: (\w+).*?principal: (\S+).*?role: (\w+)\.id", text, re.S
    )
    assert set(modules) == {
        ("workerGroup", "network.outputs.managerPrincipal", "renter"),
        ("managerGroup", "network.outputs.managerPrincipal", "attacher"),
        ("workerGroup", "network.outputs.workerPrincipal", "leaver"),
        ("hostGroup", "network.outputs.managerPrincipal", "leaver"),  # and no worker
    }
