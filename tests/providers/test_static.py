"""A pool of machines of people's own: leased one VM at a time, wiped, and kept over restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from makara.manager.providers import Ended, NoCapacity, ResourceStatus, statuses
from makara.manager.providers.nonces import GOOD_FOR_S, Nonces
from makara.manager.providers.pool import MachinePool
from makara.manager.providers.static import StaticProvider
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.machines import MachineOrders, MachineReport
from makara.worker.machine import leased
from pooled_machine import PooledMachine
from provider_stands import boot_of

AWAY_S = 60.0


class Site:
    """A manager's pool, whose clock is set by hand, and its machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.machines: list[PooledMachine] = []
        self.provider = self._opened()

    def restart(self) -> None:
        """A new manager; the machines have lost their connections."""
        for machine in self.machines:
            machine.leave()
        self.provider.close()
        self.provider = self._opened()

    def add(self) -> PooledMachine:
        machine = PooledMachine(self.folder / f"machine{len(self.machines)}")
        self.machines.append(machine)
        machine.join(self.provider.pool)
        return machine

    def create(self, vm: str, number: int = 1) -> None:
        attempt = Attempt(vm=vm, number=number, placement=Placement(provider="static"))
        self.provider.create(attempt, boot_of(attempt, self.folder))
        for machine in self.machines:
            machine.settle()

    def release(self, vm: str) -> None:
        if not self.provider.release(vm):
            for machine in self.machines:
                machine.settle()
            assert self.provider.release(vm)

    def status(self, vm: str) -> ResourceStatus | None:
        return statuses(self.provider.look(vm)).get(vm)

    def _opened(self) -> StaticProvider:
        path = self.folder / "machines.sqlite3"
        pool = MachinePool(path, away_s=AWAY_S, wall=lambda: self.now, steady=lambda: self.now)
        return StaticProvider(pool)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for machine in made.machines:
        machine.close()
    made.provider.close()


def test_without_a_free_machine_the_reason_is_told(site: Site) -> None:
    with pytest.raises(NoCapacity, match="none has joined"):
        site.create("a")
    site.add()
    site.create("a")
    with pytest.raises(NoCapacity, match="of 1 that joined, 1 are leased and 0 are not connected"):
        site.create("b")


def test_a_released_machine_is_wiped_and_leased_as_another_vm(site: Site) -> None:
    machine = site.add()
    site.create("a")
    (machine.folder / "vms" / "a-1" / "bundles").mkdir()
    assert machine.vm == "a"
    site.release("a")
    assert (machine.vm, machine.places) == (None, [])
    site.create("b")
    assert (machine.vm, machine.places) == ("b", ["b-1"])


def test_a_machine_that_cannot_be_wiped_has_ended_its_vm_and_is_not_leased(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: its VM never ended, and the machine never came back."""
    machine = site.add()
    site.create("a")
    wipe, why = leased.wipe, ["owned by another"]
    monkeypatch.setattr(leased, "_WIPE_AGAIN_S", 0.0)

    def refuse(folder: Path) -> None:
        if why:
            raise PermissionError(why[0])
        wipe(folder)

    monkeypatch.setattr(leased, "wipe", refuse)
    site.release("a")
    assert site.status("a") is ResourceStatus.GONE
    with pytest.raises(NoCapacity, match=r"of 1 that joined, 0 are leased .* and 1 cannot be wiped"):
        site.create("b")
    (known,) = site.provider.pool.machines()
    assert (known.vm, known.unwiped) == (None, "owned by another")
    why.clear()
    machine.settle()
    site.create("b")
    assert (machine.vm, machine.places) == ("b", ["b-1"])


def test_the_machine_that_was_free_for_longest_is_leased_first(site: Site) -> None:
    first, second = site.add(), site.add()
    site.create("a")
    taken, other = (first, second) if first.vm else (second, first)
    site.now += 1
    site.release("a")
    site.create("b")
    assert (taken.vm, other.vm) == (None, "b")


def test_a_second_attempt_of_a_vm_is_another_lease(site: Site) -> None:
    site.add()
    site.create("a")
    site.release("a")
    with pytest.raises(Ended):
        site.create("a")
    site.create("a", 2)
    assert [r.attempt for r in site.provider.look("a") if r.status is ResourceStatus.RUNNING] == [2]


def test_a_machine_that_comes_back_in_time_is_the_same_vm(site: Site) -> None:
    machine = site.add()
    site.create("a")
    machine.leave()
    site.now += AWAY_S / 2
    assert site.status("a") is ResourceStatus.RUNNING
    machine.join(site.provider.pool)
    site.now += AWAY_S
    assert site.status("a") is ResourceStatus.RUNNING
    assert machine.vm == "a"


def test_a_machine_is_away_since_its_connection_closed(site: Site) -> None:
    """Found: it was said to be away since it last reported a change, that is since its VM began."""
    machine = site.add()
    site.create("vm1")
    site.now += 40.0
    machine.leave()
    site.now += 5.0
    (state,) = site.provider.pool.machines()
    assert (state.connected, state.seen_at) == (False, site.now - 5.0)


def test_a_machine_that_stays_away_loses_its_lease_and_wipes_it_when_it_is_back(site: Site) -> None:
    machine = site.add()
    site.create("a")
    machine.leave()
    site.now += AWAY_S
    assert site.status("a") is ResourceStatus.GONE
    assert machine.vm == "a"
    machine.join(site.provider.pool)
    assert (machine.vm, machine.places) == (None, [])
    site.create("b")
    assert machine.vm == "b"


def test_a_machine_that_leaves_ends_its_vm_without_any_wait(site: Site) -> None:
    """Found: its VM was thought to live until the machine had been away for minutes."""
    machine = site.add()
    site.create("a")
    machine.go()
    assert site.status("a") is ResourceStatus.GONE
    (known,) = site.provider.pool.machines()
    assert (known.vm, known.connected) == (None, False)
    machine.restart()
    machine.join(site.provider.pool)
    site.create("b")
    assert machine.vm == "b"


def test_a_machine_that_leaves_is_leased_no_more_while_it_hands_over(site: Site) -> None:
    machine = site.add()
    site.create("a")
    assert machine.leased.leave(3600.0) == "a"
    machine.settle()
    (known,) = site.provider.pool.machines()
    assert (known.vm, known.leaving) == ("a", True)
    site.release("a")
    with pytest.raises(NoCapacity):
        site.create("b")


def test_a_lease_that_a_leaving_machine_has_not_heard_of_ends_with_its_connection(site: Site) -> None:
    machine = site.add()
    with machine.deaf():
        site.create("a")
        machine.leased.leave(3600.0)
        report = machine.leased.obey(None)
        assert site.provider.pool.take(machine.id, report, machine._take)
        assert site.status("a") is ResourceStatus.PENDING, "it may have begun to be this VM since"
        machine.leave()
    assert site.status("a") is ResourceStatus.GONE


def test_a_leaving_machine_begins_no_vm(site: Site) -> None:
    machine = site.add()
    with machine.deaf():
        site.create("a")
        machine.leased.leave(3600.0)
    machine.settle()
    assert (machine.vm, machine.places) == (None, [])
    assert site.status("a") is ResourceStatus.GONE


def test_a_release_waits_for_a_machine_that_is_away_but_not_for_ever(site: Site) -> None:
    machine = site.add()
    site.create("a")
    machine.leave()
    assert not site.provider.release("a")
    assert site.status("a") is ResourceStatus.ENDING
    site.now += AWAY_S
    assert site.provider.release("a")


def test_machines_and_leases_outlive_the_manager(site: Site) -> None:
    machine = site.add()
    site.create("a")
    site.restart()
    assert [(m.vm, m.connected) for m in site.provider.pool.machines()] == [("a", False)]
    assert site.status("a") is ResourceStatus.RUNNING
    machine.join(site.provider.pool)
    assert machine.vm == "a"
    site.release("a")
    assert machine.vm is None


def test_a_lease_that_a_machine_had_not_heard_of_is_told_by_the_next_manager(site: Site) -> None:
    machine = site.add()
    with machine.deaf():
        site.create("a")
        site.restart()
    machine.join(site.provider.pool)
    assert machine.vm == "a"


def test_the_boot_file_is_kept_no_longer_than_until_the_machine_has_it(site: Site) -> None:
    machine = site.add()
    secret = b"secret of a-1"
    with machine.deaf():
        site.create("a")
        assert secret in stored(site.folder)
    machine.settle()
    lease = site.provider.pool.find("a-1")
    assert lease is not None
    assert lease.boot is None
    assert secret in (machine.folder / "vms" / "a-1" / "boot.json").read_bytes()


def test_a_machine_that_is_started_anew_finds_the_agent_that_still_runs(site: Site) -> None:
    machine = site.add()
    site.create("a")
    machine.restart()
    machine.join(site.provider.pool)
    assert machine.vm == "a"
    assert site.status("a") is ResourceStatus.RUNNING


def test_a_machine_that_is_started_anew_without_its_agent_is_free(site: Site) -> None:
    machine = site.add()
    site.create("a")
    machine.leave()
    machine.kill()
    machine.restart()
    machine.join(site.provider.pool)
    assert site.status("a") is ResourceStatus.GONE
    assert machine.places == []
    site.create("b")
    assert machine.vm == "b"


def test_a_removed_machine_ends_its_vm_and_is_known_no_more(site: Site) -> None:
    site.add()
    site.create("a")
    pool = site.provider.pool
    (known,) = pool.machines()
    assert pool.remove(known.machine)
    assert not pool.knows(known.machine)
    assert site.status("a") is ResourceStatus.GONE
    assert not pool.remove(known.machine)


def test_a_machine_that_is_removed_while_it_connects_is_leased_to_nobody(site: Site) -> None:
    pool, sent = site.provider.pool, list[MachineOrders | None]()
    pool.admit("m", b"")
    assert pool.remove("m")
    pool.connect("m", sent.append)
    assert sent == [None], "the connection is to end"
    assert not pool.take("m", MachineReport(), sent.append)
    with pytest.raises(NoCapacity):
        site.create("a")


def test_an_agent_reaches_the_manager_as_its_machine_does(site: Site) -> None:
    machine = site.add()
    machine.leased.address = "10.1.2.3"
    site.create("a")
    boot = (machine.folder / "vms" / "a-1" / "boot.json").read_text()
    assert '"manager_url":"http://127.0.0.1:1"' in boot
    assert '"address":"10.1.2.3"' in boot
    assert f'"directory":"{machine.folder}/vms/a-1"' in boot


@pytest.mark.parametrize("spoil", [lambda n: n + "0", lambda n: "9" + n, lambda n: "", lambda n: "1.2.3"])
def test_a_nonce_is_this_managers_own(spoil: Callable[[str], str]) -> None:
    nonces = Nonces()
    assert not nonces.use(spoil(nonces.new()))


def test_a_nonce_is_good_once_and_for_a_minute() -> None:
    now = 1000.0
    nonces = Nonces(lambda: now)
    first, second = nonces.new(), nonces.new()
    assert nonces.use(first)
    assert not nonces.use(first)
    now += GOOD_FOR_S + 1
    assert not nonces.use(second)


def stored(folder: Path) -> bytes:
    """All that the pool has on disk."""
    found = b""
    for path in folder.glob("machines.sqlite3*"):
        with suppress(FileNotFoundError):
            found += path.read_bytes()
    return found
