"""A job of many VMs: what is sent, shown and kept is bounded by what changed and lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from core_script import Script
from in_service import Desk, FakeConnection, FakeProvider, desk
from makara.manager.api.agents import AgentConnection
from makara.manager.core import orders as orders_module
from makara.manager.core.orders import OrderParts, orders
from makara.manager.service.journal import StoredFact
from makara.manager.service.pubsub import LiveUpdate, Subscription
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.manager.service.views.steps import surviving
from makara.protocol.messages import GenerationOrder, Orders, Phase, StepMetrics


def test_orders_of_a_generation_are_made_and_written_once(monkeypatch) -> None:
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
        assert Orders.model_validate_json(parts.to_json(told)) == told
    assert made == [1] * 5, "once for all VMs, and once for each of the comparisons"


class Socket:
    """An agent's end of a WebSocket, in memory."""

    def __init__(self, *incoming: str) -> None:
        self._incoming = asyncio.Queue[str]()
        for text in incoming:
            self._incoming.put_nowait(text)
        self.sent: list[str] = []

    async def receive_text(self) -> str:
        return await self._incoming.get()

    async def send_text(self, text: str) -> None:
        self.sent.append(text)

    def generations(self) -> list[GenerationOrder]:
        told = [Orders.model_validate_json(text) for text in self.sent if '"type":"orders"' in text]
        found = [orders.generation for orders in told if orders.generation is not None]
        return [generation for generation in found if generation.kind == "train"]


def test_a_plan_is_sent_once_to_an_agent_that_keeps_it(tmp_path: Path) -> None:
    async def play(here: Desk, keeps_plans: bool) -> None:
        script = Script()
        worker, _ = script.start(2)
        vm = here.vms("j")[0]
        report = here.report_of(vm).model_copy(update={"keeps_plans": keeps_plans})
        socket: Any = Socket(report.model_dump_json())
        connection = AgentConnection(here.service, socket, "j", vm)
        serving = asyncio.create_task(connection.serve())
        await here.until(lambda: any('"type":"ack"' in text for text in socket.sent))
        for number, change in enumerate((lambda: None, script.prepare, script.open), 1):
            change()
            connection.push(orders(script.state, worker[:-2]))
            await here.until(lambda number=number: len(socket.generations()) == number)
        first, second, third = socket.generations()
        assert first.plan
        assert len(first.members) == 2
        assert {first.plan_hash} == {second.plan_hash, third.plan_hash}
        assert (first.phase, third.phase, third.endpoint) == ("prepare", "go", "10.0.0.1:1")
        for later in (second, third):
            assert (later.plan, later.members) == (({}, []) if keeps_plans else (first.plan, first.members))
        serving.cancel()

    async def both() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 2})
            await here.tick()
            await play(here, True)
            await play(here, True)  # a new connection carries it again
            await play(here, False)  # an agent of an older version

    asyncio.run(both())


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
            for _ in range(6):
                await here.tick(1.0)
                for vm in here.vms("j"):
                    report = here.report_of(vm).model_copy(update={"leaving": "its time is over"})
                    await here.service.agents.report("j", report)
                await here.until(lambda: not here.service.effects._tasks)  # they count until they are gone
            await here.tick(1.0)
            vm = here.vms("j")[0]
            await here.report("j", vm, Phase.IDLE)
            view = job_view(here.service.jobs["j"], {}, 0.0)
            assert (view.num_vms, view.num_live_vms, len(view.vms)) == (350, 50, 150)
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
