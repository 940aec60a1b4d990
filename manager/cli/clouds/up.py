"""`makara up`: shows the price of a manager's VM, asks, and starts a manager on one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from ...home import CA_FILE, ConfigError
from ...hosting.accounts import account_of
from ...hosting.ending import Patience
from ...hosting.host_settings import Host, host_of, within_one_network
from ...hosting.launching import (
    ALIVE,
    Launch,
    LaunchError,
    NothingMade,
    WrongCertificate,
    address_of,
    answers,
    there_of,
)
from ...hosting.record import VM, UpFolder, VmRecord, home_above
from ...providers import NotAllowed, ProviderError
from ...providers.settings import FILE, CloudSettings, read_settings
from ...spec.placement import Attempt, Offer
from ..client import Unreachable, agreed
from ..costs.shown import rate
from .down import tell

NOT_UP = 1  # exit status if the manager is not up


def up(options: argparse.Namespace, patience: Patience | None = None) -> int:
    """Run the command; returns 0 once the manager answers. Raises `ConfigError`, `Unreachable`."""
    patience = patience or Patience()
    home: Path = options.home.expanduser().resolve()
    if (above := home_above(home)) != home:
        raise ConfigError(f"home: {home} is what `makara up` keeps of a manager; its home is {above}")
    folder = UpFolder(home)
    with folder.held():
        record = folder.read()
        if record is not None and record.cloud != options.cloud:
            raise ConfigError(f"cloud: a manager of {home} is at {record.cloud}; `makara down` ends it")
        settings = read_settings(home) if record is None else folder.settings
        host = _host(settings, record, options)
        if record is not None and folder.url is not None:
            return _already(folder, record, host)
        offers = _offers(host, check=record is None)
        if record is None:
            _show(host, offers)
            if not options.yes and not agreed("Have it run until `makara down`?"):
                return NOT_UP
            record = _begin(folder, home, host, offers[0], patience)
        launch = Launch(
            folder=folder,
            host=host,
            placements=[offer.placement for offer in offers],
            one_network=within_one_network(settings),
            patience=patience,
            tell=tell,
        )
        return _run(launch, record)


def _run(launch: Launch, record: VmRecord) -> int:
    try:
        url = launch.run(record)
    except NothingMade as error:
        launch.folder.remove()
        raise ConfigError(f"{error}; nothing was made") from error
    except LaunchError as error:
        tell(str(error))
        return NOT_UP
    except KeyboardInterrupt:
        tell("call `makara up` again to go on, or `makara down`")
        raise
    _tell_how(launch.folder, url)
    return 0


def _host(settings: CloudSettings, record: VmRecord | None, options: argparse.Namespace) -> Host:
    """The VM to request; if one was requested before, that one. Raises `ConfigError`."""
    region, instance_type = options.region, options.instance_type
    if record is not None:
        place = record.attempt.placement
        for field, wish, has in (
            ("region", region, place.region),
            ("instance_type", instance_type, place.instance_type),
        ):
            if wish not in (None, has):
                raise ConfigError(
                    f"{field}: the manager's VM was asked for with {has}; `makara down` ends it"
                )
        region, instance_type = place.region, place.instance_type
    return host_of(settings, options.cloud, region, instance_type)


def _already(folder: UpFolder, record: VmRecord, host: Host) -> int:
    """Report on a manager that an earlier call made."""
    url, ca = folder.url, folder.ca
    assert url is not None
    try:
        if ca is not None and answers(url, folder.token, ca):
            _tell_how(folder, url)
            return 0
        trouble = ""
    except WrongCertificate as error:
        trouble = f" ({error})"
    raise Unreachable(f"the manager at {url} does not answer{trouble}; {_why(record, host, url)}")


def _why(record: VmRecord, host: Host, url: str) -> str:
    """What the cloud says about a manager that does not answer, and what to do."""
    try:
        with closing(account_of(host.cloud, host.settings, record.tag).open()) as provider:
            there = there_of(provider, record)
    except ProviderError as error:
        return f"whether its VM runs, {host.cloud} does not say: {error}"
    if not any(one.status in ALIVE for one in there if one.kind == "vm"):
        return "its VM has ended: `makara down` ends what it rented, `makara up` then makes another"
    address = address_of(host, there)
    down = "`makara down` ends it and what it rented"
    if address and address != urlsplit(url).hostname:
        return (
            f"its VM runs, and its address is now {address}, which neither VMs nor certificate know: {down}"
        )
    return (
        f"its VM runs at {address}: your own address may be another one than its security group admits "
        f"(ManagerFrom, managerFrom of the templates), or it is being started again; if nothing helps, {down}"
    )


def _offers(host: Host, *, check: bool) -> Sequence[Offer]:
    """The offers. `check`: refuse a faulty request (not for an existing VM, which already counts in quotas).
    Raises `ConfigError`, `Unreachable`."""
    try:
        with closing(account_of(host.cloud, host.settings, VM).open()) as provider:
            if check and (faults := provider.check(host.resources)):
                raise ConfigError("\n".join(f"{field}: {message}" for field, message in faults))
            offers = provider.offers(host.resources)
    except NotAllowed as error:
        raise ConfigError(f"provider: {host.cloud}: {error}") from error
    except ProviderError as error:
        raise Unreachable(f"{host.cloud} cannot be asked now: {error}; nothing was made") from error
    if not offers:
        raise ConfigError(f"instance_type: {host.cloud} offers no {host.resources.instance_type}")
    return offers


def _show(host: Host, offers: Sequence[Offer]) -> None:
    place, price = offers[0].placement, offers[0].price
    costs = f"{rate(price.hourly)} an hour ({price.source})" if price is not None else "of unknown price"
    has = f", {offers[0].num_cpus} CPUs" if offers[0].num_cpus is not None else ""
    print(
        f"a manager on 1 VM at {host.cloud}: {place.instance_type}{has}, on demand, {costs}", file=sys.stderr
    )
    places = ", ".join(dict.fromkeys(offer.placement.zone or offer.placement.region for offer in offers))
    reached = "by a public address" if host.public else "by its address in the network"
    print(f"in {place.region} ({places}), reached {reached}, port {host.port}", file=sys.stderr)
    print("not counted: traffic, and the VMs that it rents for jobs", file=sys.stderr)
    if host.settings.azure is not None and host.settings.azure.ca_file is not None:
        print("azure.ca_file is not sent: its VM trusts what its image does", file=sys.stderr)


def _begin(folder: UpFolder, home: Path, host: Host, offer: Offer, patience: Patience) -> VmRecord:
    attempt = Attempt(
        vm=VM,
        placement=offer.placement,
        image=host.resources.image_of(host.cloud) or "",
        disk_gb=host.resources.disk_gb,
    )
    return folder.begin(attempt, host.port, (home / FILE).read_text(encoding="utf-8"), patience.clock())


def _tell_how(folder: UpFolder, url: str) -> None:
    """Print the address, which alone goes to stdout."""
    print(url, flush=True)
    here, home = folder.path, folder.path.parent
    told = [
        f"the manager answers there; its authority is {here / CA_FILE}, your token {here / 'admin.token'}",
        f"here: makara ps --home {here}   (without --home until another manager is started in {home})",
        f"elsewhere, with copies of both: export MAKARA_SERVER={url} MAKARA_CA_FILE=ca.pem",
        "                                       MAKARA_TOKEN=$(cat admin.token)",
        "makara down ends it, and then what it rented",
    ]
    for line in told:
        print(line, file=sys.stderr)
