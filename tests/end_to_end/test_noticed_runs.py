"""Notices of clouds in whole runs: a real manager, agents and trainers; the metadata services are stand-ins.

A notice leads to a switch in which no step is lost, a withdrawn one to nothing; the weights are the
uninterrupted run's either way.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Forked
from http_answers import Answer, Request, answering
from makara.manager.config import ServerConfig
from makara.manager.server import serve
from makara.protocol.messages import NoticeSource
from managers import port_for
from metadata import AwsMetadata, AzureMetadata
from service_process import ServiceProcess, wait_for
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent.parent / "support"

Cloud = AwsMetadata | AzureMetadata


class CloudService(ServiceProcess):
    """As `ServiceProcess`, with VMs of a cloud whose metadata services a test scripts."""

    def __init__(self, folder: Path, source: NoticeSource) -> None:
        super().__init__(folder)
        self._source = source

    def _spawn(self, log: Path) -> Forked:
        agent = (sys.executable, str(HERE / "cloud_agent.py"), self._source.model_dump_json())
        config = ServerConfig(home=self.home, port=port_for(self.home), agent_command=agent)
        return Forked(serve, config, log=log, environment=self._environment)


@contextmanager
def cloud(
    folder: Path, kind: str, make: Callable[[str], Cloud]
) -> Iterator[tuple[CloudService, dict[str, Cloud]]]:
    """A manager whose VMs have a metadata service each, by VM."""
    services: dict[str, Cloud] = {}

    def answer(request: Request) -> Answer:
        vm, _, path = request.path.lstrip("/").partition("/")
        service = services.setdefault(vm, make(vm))
        return service.answer(Request(request.method, f"/{path}", request.headers, request.body))

    with answering(answer) as url:
        service = CloudService(folder, NoticeSource.model_validate({"kind": kind, "metadata_url": url}))
        service.start()
        try:
            yield service, services
        finally:
            service.close()


def submit(service: ServiceProcess, *, min_nodes: int = 1) -> str:
    return service.submit(
        MODEL,
        entrypoint="train:slow_gpt",
        training={**BATCH, "steps": STEPS, "numerics": "exact"},
        parallelism=SHAPE,
        resources={"min_nodes": min_nodes, "max_nodes": 2},
        checkpoint={"interval": 20},
    )


def member(service: ServiceProcess, job: str) -> str:
    """A VM that trains, once two do."""
    view = service.wait(
        job,
        lambda seen: seen["status"] == "running" and seen["step"] >= 5 and len(seen["placement"]) >= 2,
        "two VMs to train",
    )
    return str(view["placement"][-1]["vm"])


def vm_of(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(vm for vm in view["vms"] if vm["vm"] == name)


def agent_of(service: ServiceProcess, vm: str) -> psutil.Process:
    return next(p for p in service.vm_processes(vm) if p.cmdline()[-1].endswith("boot.json"))


def lost(view: dict[str, Any]) -> int:
    return sum(morph["lost_steps"] for morph in view["morphs"])


def announce(service: Cloud) -> None:
    if isinstance(service, AwsMetadata):
        service.interrupt()
    else:
        service.announce("Preempt", 120.0)


@pytest.mark.parametrize("kind", ["azure", pytest.param("aws", marks=pytest.mark.soak)])
def test_a_notice_leads_to_a_switch_without_a_lost_step(tmp_path: Path, kind: str) -> None:
    make = (lambda vm: AwsMetadata()) if kind == "aws" else (lambda vm: AzureMetadata(name=vm))
    with cloud(tmp_path, kind, make) as (service, services):
        job = submit(service)
        doomed = member(service, job)
        announce(services[doomed])
        view = service.wait(
            job, lambda seen: vm_of(seen, doomed)["status"] == "ended", "the VM to be released"
        )
        assert vm_of(view, doomed)["detail"] == "handed over before its notice ran out"
        service.end_naps()
        view = service.wait_status(job, "finished")
        assert lost(view) == 0
        assert view["export_sha256"] == reference()
        told = services[doomed]
        if isinstance(told, AzureMetadata):
            wait_for(lambda: told.started == ["e-1"], "the acknowledgement", service.logs)


def test_a_step_that_would_outlast_a_notice_is_interrupted_and_finished_without_the_vm(
    tmp_path: Path,
) -> None:
    """A step takes 26 s on two VMs, asleep: so long that a busy machine can follow."""
    batch = 64
    with cloud(tmp_path, "aws", lambda vm: AwsMetadata()) as (service, services):
        job = service.submit(
            MODEL,
            entrypoint="train:slowest_gpt",
            training={**BATCH, "global_batch_size": batch, "steps": 3, "numerics": "exact"},
            parallelism=SHAPE,
            resources={"min_nodes": 1, "max_nodes": 2},
            checkpoint={"interval": 20},
        )
        view = service.wait(
            job, lambda seen: seen["step"] >= 1 and len(seen["placement"]) >= 2, "a step of two VMs"
        )
        doomed = str(view["placement"][-1]["vm"])
        told = services[doomed]
        assert isinstance(told, AwsMetadata)
        time.sleep(3.0)  # something of the second step is done
        told.interrupt(in_s=9.0)
        service.wait(job, lambda seen: vm_of(seen, doomed)["status"] == "ended", "the VM to be released")
        service.end_naps()
        view = service.wait_status(job, "finished")
        assert vm_of(view, doomed)["detail"] == "handed over before its notice ran out"
        events = service.client.get(f"/jobs/{job}/events", since=0)["events"]
        facts = [event["fact"] for event in events if event["fact"]["fact"] == "step_interrupted"]
        # A VM that comes while a step sleeps may be worth an interruption, too.
        others = [fact["reason"] for fact in facts if not fact["reason"].startswith(f"{doomed} is gone in ")]
        assert len(facts) - len(others) == 1, facts
        assert all(reason.endswith("sooner under the new plan") for reason in others), others
        assert lost(view) == 0
        [morph] = [morph for morph in view["morphs"] if morph["cause"].startswith("notice for")]
        assert morph["in_flight"]["kept"] > 0
        assert view["export_sha256"] == reference(3, batch)


def test_a_withdrawn_notice_leads_to_nothing(tmp_path: Path) -> None:
    """No plan does without the VM, so that the notice stands for as long as the cloud says so."""
    with cloud(tmp_path, "aws", lambda vm: AwsMetadata()) as (service, services):
        job = submit(service, min_nodes=2)
        spared = member(service, job)
        told = services[spared]
        assert isinstance(told, AwsMetadata)
        told.interrupt()
        service.wait(job, lambda seen: vm_of(seen, spared)["notice"] == "terminate", "the notice")
        told.action = None
        service.wait(job, lambda seen: vm_of(seen, spared)["notice"] == "", "the notice to be withdrawn")
        service.end_naps()
        view = service.wait_status(job, "finished")
        assert len(view["vms"]) == 2
        assert lost(view) == 0
        assert view["export_sha256"] == reference()


def test_a_sigterm_that_is_a_notice_leads_to_a_switch_without_a_lost_step(tmp_path: Path) -> None:
    service = CloudService(tmp_path, NoticeSource(kind="none", sigterm_s=120.0))
    service.start()
    try:
        job = submit(service)
        doomed = member(service, job)
        agent_of(service, doomed).send_signal(signal.SIGTERM)
        view = service.wait(
            job, lambda seen: vm_of(seen, doomed)["status"] == "ended", "the VM to be released"
        )
        assert vm_of(view, doomed)["reason"] == "released"
        service.end_naps()
        view = service.wait_status(job, "finished")
        assert lost(view) == 0
        assert view["export_sha256"] == reference()
    finally:
        service.close()
