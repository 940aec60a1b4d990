"""`AwsProvider`: implements `Provider` with EC2."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import boto3

from ....protocol.messages import BootConfig, NoticeSource, StoreIdentity, VmEnding
from ...spec.job_spec import Resources
from ...spec.placement import Attempt, Offer, Placement
from .. import Ended, NotAllowed, Partial, ProviderError, Resource, ResourceStatus
from ..settings import AwsRegion, AwsSettings
from ..shared_answers import SharedAnswer
from . import finding
from .checks import Checks
from .clients import Clients
from .errors import Mismatch, UnknownToAws
from .images import Images
from .launching import launch_request, token_of
from .memory import LAG_S, RecentChanges
from .offers import Offers
from .prices import PriceList
from .regions import check_regions

_CONSOLE_BYTES = 8 << 10
_AWS = Placement(provider="aws")
_LIST_S = 5.0  # jobs share lists up to this age
_LEFTOVERS_S = 60.0
# An instance that is shut down from inside is terminated: `launch_request` sets that.
_BOOT = {
    "notices": NoticeSource(kind="aws"),
    "ending": VmEnding(kind="power_off"),
    "store_identity": StoreIdentity(kind="aws"),
}


class AwsProvider:
    """VMs in one account. `render` makes an attempt's user data; `session` has credentials (None: found as
    AWS's own tools do). Raises `NotAllowed` for a region that AWS does not have."""

    def __init__(
        self,
        settings: AwsSettings,
        *,
        manager: str,
        render: Callable[[Attempt, BootConfig], bytes],
        session: boto3.Session | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._render = render
        self._clock = clock
        self._clients = Clients(settings.endpoint_url, session)
        if settings.endpoint_url is None:
            check_regions(settings.regions)
        self._images = Images(self._clients, clock)
        self._memory = RecentChanges(clock)
        self._prices = PriceList(self._clients, clock)
        self._offers = Offers(settings, self._clients, self._prices, clock)
        self._checks = Checks(settings, self._clients, self._images, self._offers)
        self._instances = self._lists(finding.instances)
        self._leftovers = self._lists(finding.leftovers)

    # ---- the provider's contract ---------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        name = attempt.placement.region or next(iter(self._settings.regions))
        region = self._region(name)
        image = attempt.image or region.image
        if image is None:
            raise NotAllowed(f"no image: the job names none, and clouds.yaml has none for {name}")
        request = launch_request(
            attempt,
            boot.job,
            manager=self._manager,
            settings=self._settings,
            region=region,
            image=image,
            root_device=self._images.of(name, image).root_device,
            user_data=self._render(attempt, boot.model_copy(update=_BOOT)),
        )
        with self._memory.trying(attempt):
            made = self._launch(name, attempt, request)
            if made.status in (ResourceStatus.ENDING, ResourceStatus.GONE):
                raise Ended(f"{made.id} has ended: {made.taken_back or 'EC2 does not say why'}")
            self._memory.made(attempt, name, made.id)
        self._instances[name].forget()
        return made.id

    def release(self, vm: str, attempts: int = 1) -> bool:
        found = self._in_its_region(vm, lambda region: self._release_in(region, vm, attempts))
        if any(resource.status is not ResourceStatus.GONE for resource in found):
            return False
        if not found and self._memory.may_appear(vm):
            return False
        self._memory.forget(vm)
        return True

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        return self._in_its_region(vm, lambda region: self._find(region, vm, attempts))

    def list(self) -> Sequence[Resource]:
        """At most some seconds old; leftover disks and interfaces at most a minute."""
        found, failed = self._by_region(self._list_in)
        if failed and not found:
            raise next(iter(failed.values()))
        resources = [resource for some in found.values() for resource in some]
        if failed:
            raise Partial("; ".join(map(str, failed.values())), resources)
        return resources

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return self._checks.faults(resources)

    def offers(self, resources: Resources) -> Sequence[Offer]:
        return self._offers.of(resources)

    def console(self, vm: str, attempts: int = 1) -> str:
        found, failed = self._by_region(lambda region: self._find(region, vm, attempts))
        for region, resources in found.items():
            for resource in resources:
                if resource.kind == "vm":
                    return self._console(region, resource.id)
        if failed:
            raise next(iter(failed.values()))
        return ""

    def close(self) -> None:
        self._clients.close()

    # ---- creating ------------------------------------------------------------------------------------------

    def _region(self, name: str) -> AwsRegion:
        known = self._settings.regions
        if name not in known:
            raise NotAllowed(f"region {name}: clouds.yaml has no such region; it has {', '.join(known)}")
        return known[name]

    def _launch(self, region: str, attempt: Attempt, request: dict[str, Any]) -> Resource:
        ec2 = self._clients.ec2(region)
        try:
            with self._clients.translated(f"create {attempt.name}", region):
                return finding.resource_of(ec2.run_instances(**request)["Instances"][0])
        except Mismatch as error:
            return self._by_token(ec2, attempt, error)
        except UnknownToAws as error:  # an image, a subnet, a group
            raise NotAllowed(str(error)) from error

    def _by_token(self, ec2: Any, attempt: Attempt, mismatch: Mismatch) -> Resource:
        """The instance created with this token by another request (an earlier version, other settings)."""
        token = token_of(self._manager, attempt)
        with self._clients.translated(f"look for {attempt.name}"):
            found = finding.instances(ec2, self._manager, token=token)
        if not found:
            raise ProviderError(f"{mismatch}; what was created is not listed yet") from mismatch
        return found[0]

    # ---- regions -------------------------------------------------------------------------------------------

    def _by_region(
        self, ask: Callable[[str], list[Resource]], regions: Collection[str] = ()
    ) -> tuple[dict[str, list[Resource]], dict[str, ProviderError]]:
        """({region: its resources}, {region: its error}) of these regions (default: all)."""
        found: dict[str, list[Resource]] = {}
        failed: dict[str, ProviderError] = {}
        for region in regions or self._settings.regions:
            try:
                found[region] = ask(region)
            except ProviderError as error:
                failed[region] = error
        return found, failed

    def _in_its_region(self, vm: str, ask: Callable[[str], list[Resource]]) -> list[Resource]:
        """The resources of one VM. All its attempts are in one region: if this process created something
        there, other regions are not asked; if something was found, others need not answer."""
        found, failed = self._by_region(ask, self._memory.regions_of(vm))
        resources = [resource for some in found.values() for resource in some]
        if failed and not resources:
            raise next(iter(failed.values()))
        return resources

    def _lists(self, find: Callable[[Any, str], list[Resource]]) -> dict[str, SharedAnswer[list[Resource]]]:
        """By region."""

        def ask(region: str) -> list[Resource]:
            with self._clients.translated(f"list VMs in {region}", region):
                return find(self._clients.ec2(region), self._manager)

        return {
            region: SharedAnswer(lambda region=region: ask(region), self._clock)
            for region in self._settings.regions
        }

    def _list_in(self, region: str) -> list[Resource]:
        now = self._clock()
        _, instances = self._instances[region].get(since=now - _LIST_S)
        _, leftovers = self._leftovers[region].get(since=now - _LEFTOVERS_S)
        return [*instances, *leftovers]

    # ---- finding and releasing -----------------------------------------------------------------------------

    def _find(self, region: str, vm: str, attempts: int) -> list[Resource]:
        ec2 = self._clients.ec2(region)
        with self._clients.translated(f"look for {vm}", region):
            listed = finding.instances(ec2, self._manager, vm) + finding.leftovers(ec2, self._manager, vm)
        return self._with_untagged(region, vm, attempts, self._with_made(region, vm, listed))

    def _with_untagged(self, region: str, vm: str, attempts: int, found: list[Resource]) -> list[Resource]:
        """If no list has an instance of the VM, those that its attempts created, whatever became of their
        tags: EC2 keeps the client token of each."""
        if any(resource.kind == "vm" for resource in found):
            return found
        numbers = range(1, attempts + 1)
        tokens = {token_of(self._manager, Attempt(vm=vm, number=n, placement=_AWS)): n for n in numbers}
        with self._clients.translated(f"look for {vm}", region):
            return found + finding.by_tokens(self._clients.ec2(region), vm, tokens)

    def _with_made(self, region: str, vm: str, listed: list[Resource]) -> list[Resource]:
        """Resources listed by tag, and by id those created by this manager, which EC2 may not list yet."""
        ec2, found = self._clients.ec2(region), list(listed)
        known = {resource.id for resource in listed}
        for made in self._memory.made_in(vm, region):
            if made.id in known:
                continue
            try:
                with self._clients.translated(f"look for {made.id}", region):
                    one = finding.instance(ec2, made.id)
                found.append(replace(one, vm=vm, attempt=made.attempt))  # its tags may have been removed
            except UnknownToAws:
                if self._clock() - made.at < LAG_S:
                    pending = ResourceStatus.PENDING
                    found.append(Resource(vm=vm, attempt=made.attempt, id=made.id, status=pending))
        return found

    def _release_in(self, region: str, vm: str, attempts: int) -> list[Resource]:
        """Release a VM; returns what is left. Ending takes half a minute or more and is polled, so all VMs
        that are being released share lists. Leftovers show in a list newer than the VM's end.

        Instances that this manager created are told to end before any list is waited for.
        """
        ec2 = self._clients.ec2(region)
        for identity in self._memory.never_ended(vm, region):
            self._tell_end(ec2, identity)
        asked_at, listed = self._instances[region].get(since=self._clock() - _LIST_S)
        found = self._with_made(region, vm, [one for one in listed if one.vm == vm])
        found = self._with_untagged(region, vm, attempts, found)
        alive = [one.id for one in found if one.status is not ResourceStatus.GONE]
        for identity in alive:
            self._tell_end(ec2, identity)
        if alive:
            return found
        _, leftovers = self._leftovers[region].get(since=asked_at)
        left = [one for one in leftovers if one.vm == vm]
        for resource in left:
            self._delete(ec2, resource)
        if left:
            self._leftovers[region].forget()
        return found + left

    def _tell_end(self, ec2: Any, identity: str) -> None:
        """Terminate an instance, unless that was requested recently."""
        if self._memory.end_is_due(identity):
            self._end(lambda: ec2.terminate_instances(InstanceIds=[identity]), identity)
            self._memory.ended(identity)

    def _delete(self, ec2: Any, resource: Resource) -> None:
        if resource.kind == "disk":
            self._end(lambda: ec2.delete_volume(VolumeId=resource.id), resource.id)
        else:
            self._end(lambda: ec2.delete_network_interface(NetworkInterfaceId=resource.id), resource.id)

    def _end(self, call: Callable[[], object], identity: str) -> None:
        try:
            with self._clients.translated(f"end {identity}"):
                call()
        except UnknownToAws:
            return  # gone meanwhile, or too new to be known: the next look will tell

    def _console(self, region: str, identity: str) -> str:
        ec2 = self._clients.ec2(region)
        with self._clients.translated(f"console of {identity}", region):
            try:
                told = ec2.get_console_output(InstanceId=identity, Latest=True)
            except ec2.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "UnsupportedOperation":
                    raise
                # of types before Nitro: as it last was kept
                told = ec2.get_console_output(InstanceId=identity)
        return str(told.get("Output", ""))[-_CONSOLE_BYTES:]
