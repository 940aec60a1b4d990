"""What a provider's answer says of VMs of which it was not known whether they exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.events import VmListed
from ...core.state import JobState
from ...core.vms import Vm
from ...providers import Resource, ResourceStatus


def is_unsure(vm: Vm) -> bool:
    """Whether its provider has not said yet that it has the VM, or had it; or may not have it any more, since
    there was no manager for long."""
    return not vm.existed or vm.must_end_by is not None


def news_of(state: JobState, resources: Iterable[Resource], now: float) -> Iterator[VmListed]:
    """An event for each such VM that the answer shows."""
    unsure = {vm.vm: vm for vm in state.counted_vms if is_unsure(vm)}
    for one in resources if unsure else ():
        lives = one.status is not ResourceStatus.GONE
        if one.kind == "vm" and one.vm in unsure and (lives or not unsure[one.vm].existed):
            yield VmListed(now=now, vm=one.vm, number=one.attempt, lives=lives)
