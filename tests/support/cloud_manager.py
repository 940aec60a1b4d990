"""A manager on loopback, in this process, that rents from a cloud of prices and no machines; its clock is set
by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from core_script import MEMORY
from in_service import Clock, FakeProvider
from makara.manager.api.app import create_app
from makara.manager.cli.client import Client
from makara.manager.config import ServerConfig
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Market, Offer, Placement, Price
from makara.protocol.messages import DeviceInfo, Phase, Report, WorkerReport
from managers import BUNDLE, job_spec
from service_process import wait_for

T = TypeVar("T")
RESOURCES = {"provider": "aws", "instance_type": "g4dn.xlarge", "max_nodes": 4}


def offer(
    zone: str, market: Market, hourly: float | None, ceiling: float, *, source: str = "a price list"
) -> Offer:
    place = Placement(
        provider="aws", market=market, region="us-east-1", zone=zone, instance_type="g4dn.xlarge"
    )
    price = None if hourly is None else Price(hourly=hourly, ceiling=ceiling, at=900.0, source=source)
    return Offer(
        placement=place, price=price, num_cpus=4, memory_bytes=16 << 30, num_gpus=1, gpu_memory_bytes=16 << 30
    )


@dataclass
class PricedCloud(FakeProvider):
    """Every VM can be had, for these prices; none of them ever does anything."""

    priced: list[Offer] = field(
        default_factory=lambda: [
            offer("us-east-1a", Market.SPOT, 0.1578, 0.526),
            offer("us-east-1b", Market.SPOT, 0.25, 0.526),
            offer("us-east-1a", Market.ON_DEMAND, 0.526, 0.526),
        ]
    )
    asked: int = 0

    def offers(self, resources: Resources) -> Sequence[Offer]:
        self.asked += 1
        on_demand = not resources.spot or resources.on_demand_nodes > 0
        markets = {Market.SPOT: resources.spot, Market.ON_DEMAND: on_demand}
        return [offer for offer in self.priced if markets[offer.placement.market]]


@dataclass
class CloudManager:
    """What `makara --server URL --token TOKEN` reaches."""

    service: Service
    cloud: PricedCloud
    clock: Clock
    url: str
    token: str
    client: Client
    loop: asyncio.AbstractEventLoop
    sequence: int = 0

    @property
    def options(self) -> list[str]:
        return ["--server", self.url, "--token", self.token]

    def submit(self, folder: Path, **resources: Any) -> str:
        """The id of a job that rents VMs."""
        spec = {**job_spec(folder / "store"), "resources": {**RESOURCES, **resources}}
        files = {"bundle": ("bundle.tar.gz", BUNDLE, "application/gzip")}
        return self.client.post("/jobs", data={"spec": json.dumps(spec)}, files=files)["job"]

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the service do it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def until(self, job: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The job's view, once that is true of it."""
        found: list[dict[str, Any]] = []

        def looks_so() -> bool:
            found.append(self.client.get(f"/jobs/{job}"))
            return bool(condition(found[-1]))

        wait_for(looks_so, "the job to look so", lambda: str(found[-1]))
        return found[-1]

    def join(self, job: str, vm: str) -> None:
        """The VM's agent says for the first time that it is there."""
        self.sequence += 1
        worker = WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.STARTING)
        device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=MEMORY)
        report = Report(
            vm=vm,
            sequence=self.sequence,
            orders_version=0,
            address="10.0.0.1",
            devices=[device],
            workers=[worker],
        )
        self.call(self.service.agents.report(job, report))


@contextmanager
def cloud_manager(home: Path) -> Iterator[CloudManager]:
    clock, cloud = Clock(), PricedCloud()
    home.mkdir(parents=True)
    journal, tokens = SqliteJournal(home / "journal.sqlite3"), TokenStore(home / "tokens.sqlite3")
    config = ServerConfig(home=home, tick_s=0.02, cloud_list_s=0.02, rest_factor=0.0)
    token = tokens.ensure_admin(config.admin_token_file)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop = asyncio.new_event_loop()
    service = Service(config, journal, tokens, {"aws": cloud, "local": FakeProvider()}, clock=clock)
    service.manager_url = "https://192.0.2.1:8700"  # an address for documentation: no VM uses it
    server = uvicorn.Server(
        uvicorn.Config(create_app(service), log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listener])))
    thread.start()
    try:
        with Client(url, token) as client:
            yield CloudManager(service, cloud, clock, url, token, client, loop)
    finally:
        server.should_exit = True
        thread.join()
        loop.close()
        listener.close()
        tokens.close()
        journal.close()
