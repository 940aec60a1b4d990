"""What the manager relies on, whichever provider its VMs come from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from makara.manager.providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    Provider,
    ProviderError,
    ResourceStatus,
    statuses,
)
from provider_stands import CONSOLE, STANDS, Stand, Trouble, boot_of

ERRORS = {Trouble.NO_CAPACITY: NoCapacity, Trouble.REFUSED: NotAllowed}
ALIVE = (ResourceStatus.PENDING, ResourceStatus.RUNNING)


def stands(wanted: Callable[[type[Stand]], bool] = lambda kind: True) -> list[str]:
    return [name for name, (kind, _) in STANDS.items() if wanted(kind)]


def every_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    _, opened = STANDS[request.param]
    with opened(tmp_path) as stand:
        yield stand


stand = pytest.fixture(every_stand, params=stands())
troubled = pytest.mark.parametrize(
    ("stand", "trouble"),
    [(name, t) for name in stands() for t in sorted(STANDS[name][0].troubles & ERRORS.keys())],
    indirect=["stand"],
)


def create(provider: Provider, stand: Stand, vm: str, folder: Path, number: int = 1) -> str:
    attempt = stand.attempt(vm, number)
    return provider.create(attempt, boot_of(attempt, folder))


def release(provider: Provider, stand: Stand, vm: str) -> None:
    """As the manager does: again until it is gone."""
    for _ in range(10):
        if provider.release(vm):
            return
        stand.wait()
    raise AssertionError(f"{vm} never went")


def test_an_attempt_makes_one_vm_however_often_it_is_made(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    first = create(provider, stand, "vm-a", tmp_path)
    assert create(provider, stand, "vm-a", tmp_path) == first
    assert create(stand.provider(), stand, "vm-a", tmp_path) == first
    assert set(stand.billed()) == {"vm-a"}
    assert [r.id for r in provider.look("vm-a") if r.kind == "vm"] == [first]


def test_an_attempt_that_is_made_twice_at_once_makes_one_vm(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: create(provider, stand, "vm-a", tmp_path), range(4)))
    assert len(set(made)) == 1
    assert len([r for r in provider.look("vm-a") if r.kind == "vm"]) == 1


def test_what_is_created_is_found_by_the_next_manager(stand: Stand, tmp_path: Path) -> None:
    made = {vm: create(stand.provider(), stand, vm, tmp_path) for vm in ("vm-a", "vm-b")}
    stand.wait()
    later = stand.provider()
    assert {r.vm: r.id for r in later.list() if r.kind == "vm"} == made
    assert {vm: status in ALIVE for vm, status in statuses(later.list()).items()} == dict.fromkeys(made, True)
    assert {r.vm for r in later.look("vm-a")} == {"vm-a"}
    assert {r.attempt for r in later.list()} == {1}


def test_everything_that_is_billed_carries_the_name_of_its_vm(stand: Stand, tmp_path: Path) -> None:
    create(stand.provider(), stand, "vm-a", tmp_path)
    assert set(stand.billed()) == {"vm-a"}


def test_a_release_is_repeated_until_nothing_is_left(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    create(provider, stand, "vm-a", tmp_path)
    create(provider, stand, "vm-b", tmp_path)
    release(provider, stand, "vm-a")
    assert set(stand.billed()) == {"vm-b"}
    assert provider.release("vm-a")
    assert statuses(provider.look("vm-a")).get("vm-a", ResourceStatus.GONE) is ResourceStatus.GONE


def test_the_next_manager_releases_what_the_last_one_created(stand: Stand, tmp_path: Path) -> None:
    create(stand.provider(), stand, "vm-a", tmp_path)
    release(stand.provider(), stand, "vm-a")
    assert not stand.billed()


def test_a_vm_that_never_was_is_released(stand: Stand) -> None:
    provider = stand.provider()
    release(provider, stand, "vm-never")
    assert not provider.look("vm-never")
    assert provider.console("vm-never") == ""


def test_an_attempt_that_was_released_is_never_created_again(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    create(provider, stand, "vm-a", tmp_path)
    release(provider, stand, "vm-a")
    with pytest.raises(Ended):
        create(provider, stand, "vm-a", tmp_path)
    assert not stand.billed()


def test_an_attempt_that_the_cloud_ended_is_never_created_again(stand: Stand, tmp_path: Path) -> None:
    create(stand.provider(), stand, "vm-a", tmp_path)
    stand.end("vm-a")
    stand.wait()
    provider = stand.provider()
    with pytest.raises(Ended):
        create(provider, stand, "vm-a", tmp_path)
    assert not stand.billed()
    assert statuses(provider.list()).get("vm-a", ResourceStatus.GONE) is ResourceStatus.GONE


@troubled
def test_a_creation_that_fails_for_a_known_reason_has_created_nothing(
    stand: Stand, trouble: Trouble, tmp_path: Path
) -> None:
    provider = stand.provider()
    stand.trouble(trouble)
    with pytest.raises(ProviderError) as caught:
        create(provider, stand, "vm-a", tmp_path)
    assert type(caught.value) is ERRORS[trouble]
    assert str(caught.value)
    assert "secret" not in str(caught.value)
    assert not stand.billed()
    stand.relieve(trouble)
    create(provider, stand, "vm-a", tmp_path)
    assert set(stand.billed()) == {"vm-a"}


def test_two_managers_do_not_see_each_others_vms(stand: Stand, tmp_path: Path) -> None:
    first, second = stand.provider("first"), stand.provider("second")
    one = create(first, stand, "vm-a", tmp_path)
    stand.wait()
    assert not second.list()
    assert not second.look("vm-a")
    release(second, stand, "vm-a")
    assert [r.id for r in first.look("vm-a") if r.kind == "vm"] == [one]
    create(second, stand, "vm-a", tmp_path)  # names may be alike
    assert stand.billed().count("vm-a") == 2 * len(first.look("vm-a"))


def test_a_good_wish_has_no_faults_and_offers_with_prices(stand: Stand) -> None:
    provider, wish = stand.provider(), stand.resources()
    assert list(provider.check(wish)) == []
    offers = provider.offers(wish)
    assert offers
    for offer in offers:
        assert offer.price.hourly <= offer.price.ceiling
        assert offer.price.at > 0
        assert offer.price.source


def test_the_end_of_the_console_is_told(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    create(provider, stand, "vm-a", tmp_path)
    tick = threading.Event()
    for _ in range(400):
        if CONSOLE in provider.console("vm-a"):
            return
        tick.wait(0.05)
    raise AssertionError(provider.console("vm-a"))
