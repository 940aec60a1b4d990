"""What three jobs of 50 rented VMs cost the manager, and how often it asks the cloud.

`makara server` is a process of its own, and so are the agents (`cloud_agents`). The cloud is moto, behind
what moto lacks, in this process. VMs are taken back as often as in the trace of examples/replay.
"""

from __future__ import annotations

import csv
import json
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
from aws_stand import aws_stand
from rented_vms import AwsCloud, RentingManager

from .rented_fleet import RentedFleet
from .report import Row

TITLE = "three jobs of 50 VMs that are rented from moto"
JOBS, VMS = 3, 50
_SEED = 8
_TICK_S = 0.5
_TOLD_MINUTES = (5, 15, 30, 45)  # memory is told then, and at the end
_TRACE = Path(__file__).parents[1] / "examples" / "replay" / "bamboo-p3.csv"


def rows(minutes: float = 60.0) -> list[Row]:
    """A line for each action of the cloud's API, and then what the manager took."""
    with tempfile.TemporaryDirectory() as name, aws_stand(Path(name)) as stand:
        folder = Path(name)
        stand.aws.quota = float(JOBS * VMS * 4)
        stand.aws.page_size = None
        manager = RentingManager(folder / "manager", AwsCloud(stand, folder))
        manager.service.start()
        try:
            with RentedFleet(stand, manager.service, folder / "agents") as fleet:
                return _measure(fleet, _pid(manager), minutes)
        finally:
            manager.close()


def _measure(fleet: RentedFleet, pid: int, minutes: float) -> list[Row]:
    rate = evictions_per_vm_hour()
    begin = _Sample.of(fleet, pid)
    for number in range(JOBS):
        fleet.submit(f"job{number}", VMS)
    while fleet.joined < JOBS * VMS:
        _tick(fleet)
    filled = _Sample.of(fleet, pid)
    draws, evicted, least = random.Random(_SEED), 0, fleet.joined
    memory: dict[str, float] = {}
    due = [minute for minute in _TOLD_MINUTES if minute < minutes]
    while (time.monotonic() - filled.at) < 60 * minutes:
        _tick(fleet)
        if due and time.monotonic() - filled.at >= 60 * due[0]:
            what = f"memory after {due.pop(0)} minutes, {evicted} VMs taken back, MiB"
            memory[what] = _Sample.of(fleet, pid).memory_mib
        if draws.random() < fleet.joined * rate * _TICK_S / 3600:
            fleet.evict(draws)
            evicted += 1
        least = min(least, fleet.joined)
    end = _Sample.of(fleet, pid)
    found = {
        "minutes until all VMs were up": (filled.at - begin.at) / 60,
        "minutes watched": (end.at - filled.at) / 60,
        "VMs taken back while watched": evicted,
        "generations so far": fleet.generations(),
        "VMs that were there at the least": least,
        "% of a core while VMs were asked for": _core_percent(begin, filled),
        "% of a core while watched": _core_percent(filled, end),
        "memory when all VMs were up, MiB": filled.memory_mib,
        **memory,
        "memory at the end, MiB": end.memory_mib,
        "journal at the end, MiB": fleet.journal_bytes() / 2**20,
        "load of the machine": os.getloadavg()[0],
    }
    return [*_calls(begin, filled, end), *({"what": what, "found": value} for what, value in found.items())]


@dataclass(frozen=True, slots=True)
class _Sample:
    """What was counted so far, at one moment."""

    at: float
    calls: Counter[str]
    later_pages: Counter[str]
    processor_s: float
    memory_mib: float

    @staticmethod
    def of(fleet: RentedFleet, pid: int) -> _Sample:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return _Sample(
            at=time.monotonic(),
            calls=Counter(fleet.stand.aws.calls),
            later_pages=fleet.stand.aws.later_pages.copy(),
            processor_s=times.user + times.system,
            memory_mib=process.memory_info().rss / 2**20,
        )


def _calls(begin: _Sample, filled: _Sample, end: _Sample) -> list[Row]:
    found: list[Row] = []
    for action in sorted(end.calls):
        calls = end.calls[action] - filled.calls[action]
        lists = calls - (end.later_pages[action] - filled.later_pages[action])
        found.append(
            {
                "call": action,
                "until all VMs were up": filled.calls[action] - begin.calls[action],
                "while watched": calls,
                "a minute": 60 * calls / (end.at - filled.at),
                "pages a list": calls / lists if lists and action.startswith("Describe") else 0.0,
            }
        )
    return found


def _core_percent(begin: _Sample, end: _Sample) -> float:
    return 100 * (end.processor_s - begin.processor_s) / (end.at - begin.at)


def _tick(fleet: RentedFleet) -> None:
    time.sleep(_TICK_S)
    fleet.boot_and_end()


def evictions_per_vm_hour() -> float:
    """Of the trace: VMs that went, for each hour that one was there."""
    there, since_ms, there_ms, went = 0, 0, 0, 0
    with _TRACE.open() as file:
        for text, event, _ in csv.reader(file):
            there_ms += there * (int(text) - since_ms)
            since_ms = int(text)
            there += 1 if event == "add" else -1
            went += event == "remove"
    return went / (there_ms / 3.6e6)


def _pid(manager: RentingManager) -> int:
    return json.loads((manager.service.home / "server.json").read_text())["pid"]
