"""Checks that the settings cover every place where VMs of the journal may be.

A VM in a place that `clouds.yaml` no longer names can neither be listed nor ended: it would be taken for
gone, and billed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .core.state import JobState
from .core.vms import Vm
from .home import ConfigError
from .providers.settings import FILE, CloudSettings

_AZURE_ID = re.compile(r"/subscriptions/([^/]+)/resourceGroups/([^/]+)/", re.IGNORECASE)
_MOST_TOLD = 5  # VMs


def check_places(settings: CloudSettings, states: Iterable[JobState], *, local: bool = True) -> None:
    """Raise `ConfigError` naming each missing field without which VMs that may exist cannot be reached.

    `local`: whether this manager has VMs on its own machine.
    """
    lacking: dict[str, list[str]] = {}
    here: list[str] = []
    for state in states:
        for vm in state.counted_vms:
            fault = _fault(settings, vm)
            if fault:
                lacking.setdefault(fault, []).append(vm.vm)
            elif vm.attempt is not None and vm.attempt.placement.provider == "local":
                here.append(vm.vm)
    if here and not local:
        raise ConfigError(
            f"local_vms: this machine may have VMs of jobs: {_some(here)}. Start the manager with --local at "
            "least until they are gone"
        )
    if lacking:
        told = "; ".join(f"{fault}, where VMs may exist: {_some(vms)}" for fault, vms in lacking.items())
        raise ConfigError(f"{FILE}: {told}. Put it back at least until they are gone")


def _fault(settings: CloudSettings, vm: Vm) -> str:
    """What is wrong with the settings for this VM; empty if it can be reached."""
    if vm.attempt is None or vm.attempted_at is None:
        return ""
    place, aws, azure = vm.attempt.placement, settings.aws, settings.azure
    if place.provider == "aws":
        if aws is None:
            return "aws is missing"
        if place.region and place.region not in aws.regions:
            return f"aws.regions.{place.region} is missing"
    if place.provider == "azure":
        if azure is None:
            return "azure is missing"
        if found := _AZURE_ID.match(vm.id):
            subscription, group = found.groups()
            if subscription.lower() != azure.subscription_id.lower():
                return f"azure.subscription_id is no longer {subscription}"
            if group.lower() != azure.resource_group.lower():
                return f"azure.resource_group is no longer {group}"
    return ""


def _some(vms: list[str]) -> str:
    more = len(vms) - _MOST_TOLD
    return ", ".join(vms[:_MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
