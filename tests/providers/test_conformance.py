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
    QuotaExceeded,
    ResourceStatus,
    Throttled,
    statuses,
)
from makara.manager.spec.resources import PROVIDERS
from provider_stands import STANDS, Stand, boot_of
from provider_troubles import CONSOLE, Trouble

ERRORS = {
    Trouble.NO_CAPACITY: NoCapacity,
    Trouble.QUOTA: QuotaExceeded,
    Trouble.REFUSED: NotAllowed,
    Trouble.THROTTLED: Throttled,
}
ALIVE = (ResourceStatus.PENDING, ResourceStatus.RUNNING)


def stands(wanted: Callable[[type[Stand]], bool] = lambda kind: True) -> list[str]:
    return [name for name, (kind, _) in STANDS.items() if wanted(kind)]


def every_stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    _, opened = STANDS[request.param]
    with opened(tmp_path) as stand:
        yield stand


stand = pytest.fixture(every_stand, params=stands())
several = pytest.mark.parametrize("stand", stands(lambda kind: kind.counts_attempts), indirect=True)
remembering = pytest.mark.parametrize("stand", stands(lambda kind: kind.remembers_ends), indirect=True)
troubled = pytest.mark.parametrize(
    ("stand", "trouble"),
    [(name, t) for name in stands() for t in sorted(STANDS[name][0].troubles & ERRORS.keys())],
    indirect=["stand"],
)


def suffering(trouble: Trouble) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stand", stands(lambda kind: trouble in kind.troubles), indirect=True)


def test_every_provider_is_held_to_this() -> None:
    assert set(STANDS) == set(PROVIDERS)


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


@remembering
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


@suffering(Trouble.LOST_ANSWER)
def test_a_creation_whose_answer_is_lost_is_made_again_and_makes_no_second_vm(
    stand: Stand, tmp_path: Path
) -> None:
    provider = stand.provider()
    stand.trouble(Trouble.LOST_ANSWER)
    with pytest.raises(ProviderError) as caught:
        create(provider, stand, "vm-a", tmp_path)
    assert type(caught.value) is ProviderError
    made = create(provider, stand, "vm-a", tmp_path)
    assert [r.id for r in provider.look("vm-a") if r.kind == "vm"] == [made]
    release(provider, stand, "vm-a")
    assert not stand.billed()


@suffering(Trouble.LOST_ANSWER)
def test_what_a_lost_answer_would_have_told_of_is_released(stand: Stand, tmp_path: Path) -> None:
    """Lists do not have it yet: their silence is no proof."""
    provider = stand.provider()
    stand.wait()
    stand.trouble(Trouble.LATE_LISTS)
    stand.trouble(Trouble.LOST_ANSWER)
    with pytest.raises(ProviderError):
        create(provider, stand, "vm-a", tmp_path)
    assert not provider.release("vm-a")
    stand.relieve(Trouble.LATE_LISTS)
    release(provider, stand, "vm-a")
    assert not stand.billed()


@suffering(Trouble.LOST_ANSWER)
def test_the_next_manager_does_not_take_silence_for_proof(stand: Stand, tmp_path: Path) -> None:
    stand.trouble(Trouble.LATE_LISTS)
    stand.trouble(Trouble.LOST_ANSWER)
    with pytest.raises(ProviderError):
        create(stand.provider(), stand, "vm-a", tmp_path)
    later = stand.provider()
    assert not later.release("vm-a")
    release(later, stand, "vm-a")
    assert not stand.billed()


@suffering(Trouble.LATE_LISTS)
def test_a_vm_that_no_list_has_yet_is_seen_by_name_and_released(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    stand.trouble(Trouble.LATE_LISTS)
    made = create(provider, stand, "vm-a", tmp_path)
    assert not provider.list()
    assert [r.id for r in provider.look("vm-a") if r.kind == "vm"] == [made]
    release(provider, stand, "vm-a")
    assert not stand.billed()


@suffering(Trouble.UNREACHABLE)
def test_of_a_cloud_that_does_not_answer_nothing_is_known(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    create(provider, stand, "vm-a", tmp_path)
    stand.trouble(Trouble.UNREACHABLE)
    stand.wait()
    for call in (
        lambda: create(provider, stand, "vm-b", tmp_path),
        lambda: provider.release("vm-a"),
        lambda: provider.look("vm-a"),
        provider.list,
    ):
        with pytest.raises(ProviderError) as caught:
            call()
        assert type(caught.value) is ProviderError


@several
def test_a_release_ends_every_attempt(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    made = {number: create(provider, stand, "vm-a", tmp_path, number) for number in (1, 2)}
    stand.wait()
    assert {r.attempt: r.id for r in provider.list() if r.kind == "vm"} == made
    release(provider, stand, "vm-a")
    assert not stand.billed()


def test_a_long_list_is_whole(stand: Stand, tmp_path: Path) -> None:
    provider = stand.provider()
    vms = {f"vm-{number}" for number in range(5)}
    for vm in sorted(vms):
        create(provider, stand, vm, tmp_path)
    stand.wait()
    assert {r.vm for r in provider.list()} == vms


def test_two_managers_do_not_see_each_others_vms(stand: Stand, tmp_path: Path) -> None:
    first, second = stand.provider("first"), stand.provider("second")
    one = create(first, stand, "vm-a", tmp_path)
    stand.wait()
    assert not second.list()
    assert not second.look("vm-a")
    release(second, stand, "vm-a")
    assert [r.id for r in first.look("vm-a") if r.kind == "vm"] == [one]
    other = create(second, stand, "vm-a", tmp_path)  # names may be alike
    assert [r.id for r in second.look("vm-a") if r.kind == "vm"] == [other]
    release(first, stand, "vm-a")
    assert [r.status in ALIVE for r in second.look("vm-a") if r.kind == "vm"] == [True]


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
