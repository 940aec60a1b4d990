"""Launches the manager of a record: requests its VM, authenticates it, sends its payload, waits for answers.

Interrupted at any point and called again with the same record, it continues and creates no second VM.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import httpx

from ...protocol.messages import BootConfig
from ..providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    Provider,
    ProviderError,
    QuotaExceeded,
    Resource,
    ResourceStatus,
    Throttled,
    Unauthenticated,
)
from ..providers.opening import open_clouds
from ..spec.placement import Attempt, Placement
from .accounts import account_of
from .ending import LAG_S, Patience, end_all
from .host_settings import Host
from .pairing import NobodyThere, NotOurs, Taken, pair
from .record import PAIR_WITHIN_S, VM, UpFolder, VmRecord
from .user_data import user_data

UP_WITHIN_S = 2400.0  # covers a VM that starts late and an installation over a slow network
_MOST_LIVES = 3
ALIVE = (ResourceStatus.PENDING, ResourceStatus.RUNNING)
_REFUSALS = (NoCapacity, NotAllowed, QuotaExceeded, Unauthenticated)
_CONSOLE_CHARACTERS = 1500
_TIMEOUT_S = 10.0


class LaunchError(Exception):
    """The manager is not up, and its VM may exist. The message says what to do next."""


class NothingMade(LaunchError):
    """The cloud refused, and nothing of the attempt exists."""


class WrongCertificate(Exception):
    """Something answers without a certificate of the manager's authority for that address."""


class _VmGone(Exception):
    """The VM ended before it became a manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of `makara up`."""

    folder: UpFolder
    host: Host
    placements: Sequence[Placement]  # in the order in which they are tried
    one_network: bool  # of manager and workers
    patience: Patience
    tell: Callable[[str], object]

    def run(self, record: VmRecord) -> str:
        """The manager's URL. Raises `LaunchError`."""
        for _ in range(_MOST_LIVES):
            try:
                return self._one_life(record, self.patience.clock() + UP_WITHIN_S)
            except _VmGone as error:
                self.tell(str(error))
                record = self._anew(record)
        raise LaunchError(f"{_MOST_LIVES} VMs have ended before one was a manager; nothing is left of them")

    # ---- the VM --------------------------------------------------------------------------------------------

    def _one_life(self, record: VmRecord, until: float) -> str:
        while True:
            with closing(self._provider(record)) as provider:
                try:
                    if self._is_late(record):
                        self._check_alive(provider, record)
                    else:
                        self._create(provider, record, until)
                    return self._met(provider, record, until)
                except NoCapacity as error:
                    self.tell(f"none to be had: {error}")
            record = self._elsewhere(record)

    def _provider(self, record: VmRecord) -> Provider:
        def render(attempt: Attempt, boot: BootConfig) -> bytes:
            return self.folder.user_data(lambda: user_data(record, boot.ending))

        return open_clouds(self.host.settings, record.tag, render)[record.cloud]

    def _is_late(self, record: VmRecord) -> bool:
        """Whether the record's VM, if it exists, no longer waits to be paired."""
        return self.folder.was_asked and self.patience.clock() - record.asked_at > PAIR_WITHIN_S

    def _check_alive(self, provider: Provider, record: VmRecord) -> None:
        """A VM that was paired before may be a manager by now. Raises `_VmGone` if it does not exist: a new
        VM needs a new secret."""
        try:
            there = there_of(provider, record)
        except ProviderError as error:
            raise LaunchError(f"{error}; call `makara up` again to go on") from error
        if self.folder.ca is None or not any(one.status in ALIVE for one in there if one.kind == "vm"):
            raise _VmGone("the VM that was asked for before was met by nobody, or has ended")

    def _create(self, provider: Provider, record: VmRecord, until: float) -> None:
        """Raises `NoCapacity`, `NothingMade` (nothing of the attempt exists), `_VmGone`, `LaunchError`."""
        unknown = self.folder.was_asked  # whether an earlier call of this attempt may have created a VM
        boot = BootConfig(vm=VM, job=VM, manager_url="", join_token="", directory="")
        while True:
            self.folder.write(record)
            try:
                self.tell(f"VM {provider.create(record.attempt, boot)}: {_where(record.attempt.placement)}")
                return
            except Ended as error:
                raise _VmGone(str(error)) from error
            except _REFUSALS as error:
                if unknown:
                    raise LaunchError(
                        f"{error}; an earlier call may have made a VM: `makara down`"
                    ) from error
                if isinstance(error, NoCapacity):
                    raise
                raise NothingMade(str(error)) from error
            except Throttled as error:  # this call created nothing
                self.tell(str(error))
            except ProviderError as error:  # outcome unknown: repeat the same call
                self.tell(str(error))
                unknown = True
            if self.patience.clock() > until:
                raise LaunchError("the cloud has not answered; call `makara up` again, or `makara down`")
            self.patience.sleep(self.patience.pause_s)

    def _elsewhere(self, record: VmRecord) -> VmRecord:
        """A record at the next placement. Raises `NothingMade` after the last."""
        places, here = list(self.placements), record.attempt.placement
        number = places.index(here) + 1 if here in places else 0
        if number == len(places):
            raise NothingMade("no place has capacity; try another type or region, or later")
        return self.folder.begin_again(record, places[number], self.patience.clock())

    def _anew(self, record: VmRecord) -> VmRecord:
        """Delete the attempt's resources; returns a new record. Raises `LaunchError` if any stay."""
        account = account_of(record.cloud, self.host.settings, record.tag)
        left = end_all([account], self.patience, self.tell, not_before=self.folder.written_at + LAG_S)
        if left:
            raise LaunchError(f"left: {'; '.join(left)}; see to it with `makara down`")
        return self.folder.begin_again(record, record.attempt.placement, self.patience.clock())

    # ---- the manager ---------------------------------------------------------------------------------------

    def _met(self, provider: Provider, record: VmRecord, until: float) -> str:
        """Raises `_VmGone`, `LaunchError`."""
        told, seen_at, late = "", self.patience.clock(), False
        while not late:
            late = self.patience.clock() >= until  # look once more: this machine may have slept
            try:
                there = there_of(provider, record)
                machines = [one for one in there if one.kind == "vm"]
                if any(one.status in ALIVE for one in machines):
                    seen_at = self.patience.clock()
                elif machines or self.patience.clock() - seen_at > LAG_S:
                    raise _VmGone(f"the VM has ended. {self._console(provider, record)}")
                url, trouble = self._answering(record, there)
                if url is not None:
                    return url
                news = self._introduced(record, there) + trouble
            except ProviderError as error:
                news = str(error)
            if news != told:
                self.tell(news)
                told = news
            if not late:
                self.patience.sleep(self.patience.pause_s)
        raise LaunchError(
            "the manager does not answer yet; call `makara up` again to go on, or `makara down`. "
            f"{self._console(provider, record)}"
        )

    def _answering(self, record: VmRecord, there: Sequence[Resource]) -> tuple[str | None, str]:
        """(the manager's URL, or None while none accepts the owner's token; what is wrong with its
        certificate)."""
        address, ca = address_of(self.host, there), self.folder.ca
        url = _url_of(address, record.port)
        try:
            if not address or ca is None or not answers(url, self.folder.token, ca):
                return None, ""
        except WrongCertificate as error:
            return None, f"; {error}"
        self.folder.is_up(url)
        return url, ""

    def _introduced(self, record: VmRecord, there: Sequence[Resource]) -> str:
        """Try to send the VM its payload; returns the result as text."""
        address, (private, public) = address_of(self.host, there), addresses(there)
        if not address:
            return "the VM has no address yet"
        reached = private if self.one_network and private else address
        told = {"url": _url_of(reached, record.port), "names": sorted({private, public} - {""})}
        try:
            pair(address, record.port, record.secret, self.folder.payload, told, self.folder.trust)
        except (NobodyThere, Taken):
            if self.folder.ca is not None:  # paired before
                return "the VM installs Makara"
            where = f"{address}:{record.port}"
            return f"nobody answers at {where} yet: the VM boots, or a security group is in the way"
        except NotOurs as error:
            return f"{address}: {error}"
        return "the VM has what it needs, and installs it"

    def _console(self, provider: Provider, record: VmRecord) -> str:
        try:
            text = provider.console(VM, record.attempt.number)
        except ProviderError as error:
            return f"Its console cannot be read: {error}"
        return f"Its console ends so:\n{text[-_CONSOLE_CHARACTERS:]}" if text else ""


def there_of(provider: Provider, record: VmRecord) -> list[Resource]:
    """The attempt's resources, found by name and by tag: a list may lag, and a cloud may choose other names.
    A lookup by name says more of a VM than a list. Raises `ProviderError`."""
    number = record.attempt.number
    found = list(provider.look(VM, number))
    named = {one.id for one in found}
    found += [one for one in provider.list() if one.id not in named]
    return [one for one in found if one.vm == VM and one.attempt == number]


def answers(url: str, token: str, ca: str) -> bool:
    """Whether a manager of that authority answers and accepts this token. Raises `WrongCertificate`."""
    trust = ssl.create_default_context(cadata=ca)
    try:
        with httpx.Client(verify=trust, timeout=_TIMEOUT_S, trust_env=False) as client:
            return client.get(f"{url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}).is_success
    except httpx.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):  # httpx keeps the error of `ssl` as text
            raise WrongCertificate(f"{url}: {error}") from error
        return False


def addresses(there: Sequence[Resource]) -> tuple[str, str]:
    """(private address, public address); empty while unknown."""
    private = next((one.private_address for one in there if one.private_address), "")
    return private, next((one.public_address for one in there if one.public_address), "")


def address_of(host: Host, there: Sequence[Resource]) -> str:
    """The address at which `makara up` reaches the VM; empty while unknown."""
    private, public = addresses(there)
    return public if host.public else private


def _url_of(address: str, port: int) -> str:
    return f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}"


def _where(place: Placement) -> str:
    return f"{place.instance_type} in {place.zone or place.region}"
