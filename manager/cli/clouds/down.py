"""`makara down`: shows what a home's managers have at clouds, asks, and deletes all of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Generator, Sequence
from datetime import datetime
from pathlib import Path

from rich.table import Table

from ...home import ConfigError
from ...hosting.accounts import CloudAccount, manager_accounts, worker_accounts
from ...hosting.ending import LAG_S, Leftover, Patience, end_all, found_in
from ...hosting.record import UpFolder, home_above
from ...providers import ProviderError
from ...providers.settings import FILE, CloudSettings, read_settings
from ...service.journal import JournalLocked, hold
from ..client import agreed
from ..progress import counted
from ..show import print_table

LEFT = 1  # exit status if something is left
_LAG = (
    f"the manager's VM has ended. What it rented last may be missing in lists for {LAG_S / 60:.0f} minutes, "
    "and they are asked for so long. Cut off, `makara down` waits for the rest of them alone"
)
_UNKNOWN = (
    "home: no manager is known in {home}: it has no tokens.sqlite3 of one that ran, and no up/record.json "
    "of one that `makara up` made. No cloud was asked. Give the home that the manager was started with"
)


def down(options: argparse.Namespace, patience: Patience | None = None) -> int:
    """Run the command; returns 0 only if nothing is left. Raises `ConfigError`."""
    patience = patience or Patience()
    home = home_above(options.home.expanduser().resolve())
    folder = UpFolder(home)
    with _without_manager(home), folder.held() if folder.path.exists() else contextlib.nullcontext():
        settings = _settings(home, folder, options.cloud)
        own, rented = manager_accounts(home)
        accounts = [*rented, *worker_accounts(home, settings)]
        if not accounts:
            raise ConfigError(_UNKNOWN.format(home=home))
        of_own = _found(own)
        found = [*of_own, *_found(accounts)]
        places = _places(settings, with_manager=bool(own))
        _show(found, places, as_json=options.json)
        if found and not options.yes and not agreed("End all of it? What VMs have not saved is lost."):
            return LEFT
        left = _end(home, folder, (own, of_own), accounts, patience)
    for text in left:
        tell(f"left: {text}")
    if not left:
        tell(f"nothing is left in {places}")
    return LEFT if left else 0


def _end(
    home: Path,
    folder: UpFolder,
    own: tuple[list[CloudAccount], list[Leftover]],
    accounts: list[CloudAccount],
    patience: Patience,
) -> list[str]:
    """Delete all; returns what is left. `own`: a manager's own VM and what was found of it, which goes first,
    because the manager would replace the VMs that it rented."""
    has_own, not_before = bool(own[0]), _last_written(home)
    if has_own:
        if left := _end_own(folder, *own, patience):
            return left
        if folder.may_have_run and folder.ended_at is not None:
            not_before = max(not_before, folder.ended_at)  # it may have requested a VM just then
            if patience.clock() < not_before + LAG_S:
                tell(_LAG)
    left = end_all(accounts, patience, tell, not_before=not_before + LAG_S)
    if has_own and not left:
        folder.remove()
    return left


def _end_own(
    folder: UpFolder, own: Sequence[CloudAccount], found: Sequence[Leftover], patience: Patience
) -> list[str]:
    """Delete the manager's own VM; returns what is left. An attempt creates at most one VM: once it has been
    listed, no other can appear."""
    record = folder.read()
    assert record is not None
    seen = any(one.resource.kind == "vm" and one.resource.attempt == record.attempt.number for one in found)
    left = end_all(own, patience, tell, not_before=0.0 if seen else folder.written_at + LAG_S)
    if not left and (found or folder.ended_at is None):
        folder.has_ended(patience.clock())
    return left


def _settings(home: Path, folder: UpFolder, cloud: str | None) -> CloudSettings:
    """The settings that say where to look. Raises `ConfigError`."""
    if folder.read() is None:
        return _chosen(read_settings(home), cloud, home)
    theirs, ours = folder.settings, read_settings(home)
    both = {**_sections(theirs), **_sections(ours)}
    if cloud is not None and list(both) != [cloud]:
        message = f"cloud: the manager that `makara up` made rents in {', '.join(both)}; leave the cloud out"
        raise ConfigError(message)
    return CloudSettings.model_validate(both)


def _sections(settings: CloudSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _chosen(settings: CloudSettings, cloud: str | None, home: Path) -> CloudSettings:
    there = sorted(settings.model_fields_set)
    if not there or (cloud is not None and cloud not in there):
        lacks = f"has no section {cloud or 'of a cloud'}" if (home / FILE).exists() else "is not there"
        raise ConfigError(
            f"{home / FILE}: {lacks}: it says where to look for what this home's managers rented"
        )
    names = there if cloud is None else [cloud]
    return CloudSettings.model_validate({name: getattr(settings, name) for name in names})


@contextlib.contextmanager
def _without_manager(home: Path) -> Generator[None]:
    """Keep managers of this home from running meanwhile: they would replace VMs."""
    journal = home / "journal.sqlite3"
    if not journal.exists():
        yield
        return
    try:
        held = hold(journal)
    except JournalLocked as error:
        message = f"a manager runs in {home}, and would ask for other VMs: end it first ({error})"
        raise ConfigError(message) from error
    with held:
        yield


def _last_written(home: Path) -> float:
    """When a manager of this home last wrote its journal, as it does before each attempt; 0.0: never."""
    files = (home / f"journal.sqlite3{end}" for end in ("", "-wal"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _found(accounts: Sequence[CloudAccount]) -> list[Leftover]:
    try:
        return [one for account in accounts for one in found_in(account)]
    except ProviderError as error:
        raise ConfigError(f"what there is cannot be listed: {error}") from error


def _show(found: Sequence[Leftover], places: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"found": [_as_json(one) for one in found]}), flush=True)
        return
    if not found:
        print(f"nothing in {places} carries the tag of this home's manager", flush=True)
        return
    table = Table("CLOUD", "KIND", "NAME", "STATUS", "TYPE", "AGE", "USD/H", box=None, pad_edge=False)
    for one in found:
        there = one.resource
        where = there.placement
        kind = f"{there.kind} ({where.market})" if where is not None else there.kind
        size = where.instance_type if where is not None else ""
        table.add_row(one.cloud, kind, there.vm, there.status, size, _age(there.created_at), _hourly(one))
    print_table(table)
    unknown = sum(one.price is None for one in found if one.resource.kind == "vm")
    more = f", and {counted(unknown, 'VM')} of unknown price" if unknown else ""
    total = sum(one.price.hourly for one in found if one.price is not None)
    print(f"together {total:.3f} USD an hour{more}; traffic and what lies in stores apart")


def _as_json(one: Leftover) -> dict[str, object]:
    there, where = one.resource, one.resource.placement
    return {
        "cloud": one.cloud,
        "kind": there.kind,
        "vm": there.vm,
        "id": there.id,
        "status": there.status,
        "market": where.market if where is not None else None,
        "instance_type": where.instance_type if where is not None else None,
        "created_at": there.created_at,
        "hourly": one.price.hourly if one.price is not None else None,
    }


def _age(created_at: float | None) -> str:
    if created_at is None:
        return ""
    minutes = int(max(0.0, time.time() - created_at) / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _hourly(one: Leftover) -> str:
    if one.resource.kind != "vm":
        return ""
    return "?" if one.price is None else f"{one.price.hourly:.3f}"


def _places(settings: CloudSettings, *, with_manager: bool) -> str:
    """The places that are searched: regions of AWS, resource groups of Azure."""
    aws, azure = settings.aws, settings.azure
    places = [f"aws ({', '.join(aws.regions)})"] if aws is not None else []
    if azure is not None:
        groups = [azure.resource_group]
        if with_manager and azure.manager is not None:
            groups.append(azure.manager.resource_group)
        places.append(f"azure ({', '.join(groups)})")
    return " and ".join(places)


def tell(text: str) -> None:
    """Print progress with the time."""
    print(f"{datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)
