"""A job of many VMs: what is sent, shown and kept is bounded by what changed and lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from pathlib import Path

from core_script import Script, spec
from in_service import FakeConnection, FakeProvider, desk
from makara.manager.core import fold
from makara.manager.core import orders as orders_module
from makara.manager.core.facts import Fact, GenerationPlanned, Submitted, VmJoined, VmRequested
from makara.manager.core.orders import OrderParts, orders
from makara.manager.service.journal import StoredFact
from makara.manager.service.pubsub import LiveUpdate, Subscription
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.manager.service.views.steps import surviving
from makara.pipeline import Range, grid
from makara.protocol.messages import DeviceInfo, Phase, StepMetrics


def test_the_order_of_a_generation_is_made_once(monkeypatch) -> None:
    script = Script()
    script.run(4)
    made: list[int] = []
    original = orders_module._order

    def counted(state, generation, secret):
        made.append(generation.number)
        return original(state, generation, secret)

    monkeypatch.setattr(orders_module, "_order", counted)
    parts = OrderParts()
    for vm in script.state.vms:
        told = orders(script.state, vm, parts=parts)
        assert told == orders(script.state, vm, parts=OrderParts())
    assert made == [1] * 5, "once for all VMs, and once for each of the comparisons"


def test_all_orders_of_a_generation_grow_as_the_number_of_its_vms() -> None:
    """Each VM was told the whole plan: 4.5, 17.4, 69.3 MB for 250, 500, 1000 of them."""
    sizes = {number: told_bytes(number) for number in (16, 64, 256)}
    assert max(sizes.values()) / max(sizes) < 1.1 * min(sizes.values()) / min(sizes)


def told_bytes(number: int) -> int:
    device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 30).model_dump()
    vms = [f"j-vm{one}" for one in range(number)]
    facts: list[Fact] = [Submitted(at=1.0, job="j", spec=spec(), bundle_sha256="none")]
    for vm in vms:
        facts.append(VmRequested(at=1.0, vm=vm))
        facts.append(VmJoined(at=1.0, vm=vm, address="10.0.0.1", devices=(device,)))
    planned = GenerationPlanned(
        at=1.0,
        number=1,
        cause="start",
        plan=grid([Range(0, 1), Range(1, 2)], number // 2, number).to_json(),
        members=tuple((f"{vm}.0", 1) for vm in vms),
        predicted_s=1.0,
        detected_at=1.0,
        decided_s=1.0,
    )
    state, parts = fold([*facts, planned]), OrderParts()
    told = [orders(state, vm, parts=parts) for vm in vms]
    assert all(one.generation is not None and len(one.generation.ranks) == 1 for one in told)
    assert [bool(one.generation and one.generation.plan) for one in told].count(True) == 1
    return sum(len(one.model_dump_json()) for one in told)


def test_only_vms_whose_orders_changed_are_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 8})
            await here.tick()
            connections = {vm: FakeConnection() for vm in here.vms("j")}
            for vm, connection in connections.items():
                here.service.agents.connect("j", vm, connection)
            first, *others = connections
            starting = (here.report("j", vm, Phase.STARTING) for vm in others)
            await asyncio.gather(here.report("j", first), *starting)
            assert connections[first].orders[-1].action == "profile"
            told = {vm: len(connection.orders) for vm, connection in connections.items()}
            assert all(told[vm] == 1 for vm in others), told
            last = here.vms("j")[-1]
            report = here.report_of(last).model_copy(update={"leaving": "its time is over"})
            await here.service.agents.report("j", report)
            assert connections[last].orders[-1].action == "shutdown"
            assert sum(len(c.orders) for c in connections.values()) == sum(told.values()) + 1

    asyncio.run(play())


def test_a_view_holds_what_lives_and_the_last_that_ended(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 50})
            for _ in range(3):
                for _ in range(4):
                    await here.tick(5.0)  # past the pause that follows such a loss
                for vm in here.vms("j"):
                    report = here.report_of(vm).model_copy(update={"leaving": "its time is over"})
                    await here.service.agents.report("j", report)
                await here.until(lambda: not here.service.effects._tasks)  # they count until they are gone
            for _ in range(4):
                await here.tick(5.0)
            vm = here.vms("j")[0]
            await here.report("j", vm, Phase.IDLE)
            view = job_view(here.service.jobs["j"], {}, 0.0)
            assert (view.num_vms, view.num_live_vms, len(view.vms)) == (200, 50, 150)
            assert next(shown for shown in view.vms if shown.vm == vm).workers == [f"{vm}.0: idle"]

    asyncio.run(play())


def test_a_page_that_does_not_read_keeps_the_newest_status_and_few_facts() -> None:
    async def play() -> None:
        page = Subscription()
        for number in range(5000):
            assert page.offer(LiveUpdate("status", {"number": number}))
            assert page.offer(LiveUpdate("fact", {"at": 1.0}, number))
        assert len(page._facts) + len(page._steps) <= 200
        kinds = []
        while page._status is not None or page._facts or page._behind:
            update = await page.next()
            assert update is not None
            kinds.append(update.kind)
        assert (kinds[0], kinds.count("behind"), kinds.count("status")) == ("behind", 1, 1)
        assert page.offer(LiveUpdate("fact", {"at": 1.0}, 5001)), (
            "facts are told again after it has caught up"
        )
        for number in range(5000):
            page.offer(LiveUpdate("step", {"step": number}))
        assert await page.next() is None

    asyncio.run(play())


def test_steps_of_the_surviving_history_are_those_that_no_later_generation_took_back() -> None:
    script = Script()
    script.run(2)
    job = Job("j", [StoredFact(n, fact) for n, fact in enumerate(script.facts, 1)], [])
    rows = [
        StepMetrics(step=step, generation=generation, loss=1.0, grad_norm=1.0, seconds=1.0, samples=1)
        for generation in (0, 1, 2)
        for step in (0, 1, 2)
    ]
    kept = [(row.generation, row.step) for row in surviving(job.state, rows)]
    assert kept == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def known_to(name: str, *holders: object) -> set[str]:
    """The fields of these in which something is kept under that name."""
    fields = [(field, value) for holder in holders for field, value in vars(holder).items()]
    return {field for field, value in fields if isinstance(value, Mapping | Set) and name in value}


def test_of_a_vm_that_is_gone_only_the_history_of_its_job_is_kept(tmp_path: Path) -> None:
    async def play() -> None:
        provider = FakeProvider()
        async with desk(tmp_path, provider) as here:
            await here.submit("j", resources={"max_nodes": 2})
            await here.tick()
            service, job, effects = here.service, here.service.jobs["j"], here.service.effects
            await here.until(lambda: not effects._tasks)
            first = here.vms("j")[0]
            connection = FakeConnection()
            service.agents.connect("j", first, connection)
            service.agents.not_understood("j", first, "it says what nobody knows")
            await here.report("j", first)
            service.agents.not_understood("j", first, "it says what nobody knows")
            holders = (job, job.observations, effects, effects.renting, service.watches["local"])
            assert known_to(first, *holders) >= {
                "connections",
                "told",
                "reports",
                "not_understood",
                "last_reports",
            }

            provider.vms.clear()
            for _ in range(3):  # it is gone by the second
                await service.watches["local"].look()
            service.agents.not_understood("j", first, "it says so again")
            await service.agents.disconnect("j", first, connection)
            await here.tick(1.0)
            await here.until(lambda: not effects._tasks)
            holders = (job, job.observations, effects, effects.renting, service.watches["local"])
            assert known_to(first, *holders) == set()
            assert known_to(first, job.state) == {"vms"}
            assert known_to(f"{first}.0", *holders, job.state) == set()

    asyncio.run(play())
