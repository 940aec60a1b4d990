"""A region of a cloud that cannot be asked: VMs there have not ended, and those elsewhere are seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lying_cloud import Habits
from lying_history import JOB, History, Resources, explained
from makara.manager.core.facts import VmEnded
from makara.manager.providers import Partial, ProviderError, Resource, ResourceStatus
from makara.manager.service.vms.watch import ProviderWatch
from virtual_time import run_virtually

FAULT = "list VMs in ap-east-1: AuthFailure"


class Half:
    """A provider whose list lacks a region, which it cannot be asked about."""

    def __init__(self, inner: Any, found: Sequence[Resource]) -> None:
        self._inner, self._found = inner, found

    def list(self) -> Sequence[Resource]:
        raise Partial(FAULT, self._found)

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        raise ProviderError(FAULT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _play(home: Path, act: Callable[[History, ProviderWatch, str], Awaitable[None]]) -> None:
    async def run() -> None:
        changes: dict[str, Any] = {"provider": "aws", "instance_type": "small", "zones": ["a"]}
        resources = Resources(max_nodes=1, changes=changes)
        history = History("partial", home, resources, habits=Habits(), clock_steps=False)
        history.cloud.be_honest()
        with explained(history):
            try:
                history.begin()
                await history.until(lambda: history.joined() == 1, 3000.0, "a VM")
                await history.wait(300.0)  # its absence from a list means something by now
                assert history.life is not None
                assert history.life.service is not None
                (machine,) = history.cloud.billed()
                await act(history, history.life.service.watches["aws"], machine.attempt.vm)
            finally:
                await history.close()

    run_virtually(run())


def _ended(history: History) -> list[str]:
    return [fact.vm for fact in history.journal.written[JOB] if isinstance(fact, VmEnded)]


def test_a_vm_that_may_be_in_a_region_that_cannot_be_asked_has_not_ended(tmp_path: Path) -> None:
    async def act(history: History, watch: ProviderWatch, vm: str) -> None:
        watch.provider = Half(watch.provider, [])
        await history.wait(300.0)
        assert not _ended(history)
        assert FAULT in watch.effects.trouble[JOB]["list/aws"]

    _play(tmp_path, act)


def test_a_vm_that_ended_elsewhere_is_seen_all_the_same(tmp_path: Path) -> None:
    async def act(history: History, watch: ProviderWatch, vm: str) -> None:
        gone = Resource(vm=vm, attempt=1, id="i-1", status=ResourceStatus.GONE)
        watch.provider = Half(watch.provider, [gone])
        await history.until(lambda: vm in _ended(history), 100.0, "its end")

    _play(tmp_path, act)
