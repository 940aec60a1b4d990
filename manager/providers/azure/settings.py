"""The section `azure` of `clouds.yaml`: place, network and identities of worker VMs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...home import DEFAULT_PORT
from ...spec.fields import JobSection

_ID = r"^/subscriptions/[^/\s]+/resourceGroups/[^/\s]+/providers/Microsoft\."
_HTTPS = r"^https://[^\s/]+(/\S*)?$"

ResourceId = Annotated[str, Field(pattern=_ID + r"\S+$")]
ResourceGroup = Annotated[str, Field(pattern=r"^[\w().-]{1,90}$")]
SubnetId = Annotated[str, Field(pattern=_ID + r"Network/virtualNetworks/[^/\s]+/subnets/[^/\s]+$")]
Address = Annotated[str, Field(pattern=_HTTPS)]


class AzureManager(JobSection):
    """The VM of `makara up azure` (docs/clouds/up.md)."""

    # Separate from worker VMs: each of those may delete all VMs in their group.
    resource_group: ResourceGroup
    identity_id: ResourceId  # user-assigned: what the manager may do
    subnet_id: SubnetId
    security_group_id: ResourceId
    instance_type: str = "Standard_B2s"
    image: Annotated[str, Field(min_length=1)] | None = None  # None: that of worker VMs
    disk_gb: Annotated[int, Field(ge=8, le=65536)] | None = None  # None: as large as the image
    public_address: bool = True  # False: it is reached by its address in the network
    port: Annotated[int, Field(ge=1024, le=65535)] = DEFAULT_PORT  # below, only root may listen


class AzureSettings(JobSection):
    """The outputs of `deploy/azure/manager.bicep`, and settings of worker VMs."""

    subscription_id: Annotated[str, Field(pattern=r"^[0-9a-fA-F-]{36}$")]
    resource_group: ResourceGroup  # worker VMs, and nothing else
    region: Annotated[str, Field(pattern=r"^[a-z0-9]+$")]  # the subnet's, such as westeurope
    subnet_id: SubnetId
    security_group_id: ResourceId | None = None
    identity_id: ResourceId | None = None  # user-assigned; with it a worker VM ends itself
    store_identity_id: ResourceId | None = None  # likewise; as it trainers sign in to az:// stores
    image: Annotated[str, Field(min_length=1)] = "Canonical:ubuntu-24_04-lts:server:latest"  # or its id
    disk_gb: Annotated[int, Field(ge=1, le=65536)] | None = None  # None: as large as the image
    disk_type: Literal["Standard_LRS", "StandardSSD_LRS", "Premium_LRS"] = "StandardSSD_LRS"
    ssh_public_key: Annotated[str, Field(pattern=r"^ssh-(rsa|ed25519) \S+")] | None = None  # None: nobody's
    public_address: bool = False
    manager: AzureManager | None = None  # None: there is no `makara up azure`
    resource_manager: Address = "https://management.azure.com"
    prices: Address = "https://prices.azure.com/api/retail/prices"
    ca_file: str | None = None  # the trusted certificates; None: those of `certifi`
