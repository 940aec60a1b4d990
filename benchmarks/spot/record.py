"""One real run: the market, played to a manager whose plans a policy chooses, and what it tells of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makara.manager.replay import POLICIES
from makara.simulator import Calibration, Measurements
from service_process import ServiceProcess

from .job import MICROBATCH_SIZE, sections
from .market import NODES, Spot
from .measured import Start, began
from .player import Played, Player


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`view` and `steps` as the manager's interface gives them at the end of the window, all VMs included."""

    policy: str
    window_s: float
    start: Start
    view: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    calibration: Calibration
    played: Played


class PolicyProcess(ServiceProcess):
    """A manager whose plans a policy chooses, in a folder of its own."""

    def __init__(self, folder: Path, policy: str) -> None:
        folder.mkdir()
        super().__init__(folder, forked=False)
        self._policy = policy

    def _spawn(self, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.spot.policy_server", str(self.home), self._policy]
        return self._run(command, log)


def record(policy: str, market: Spot, window_s: float, folder: Path, code: Path) -> Record:
    """Run it in `folder`, where all jobs share a store, and with it the measurements of their model."""
    given = sections(POLICIES[policy])
    given["checkpoint"] |= {"uri": f"file://{folder}/store"}
    service = PolicyProcess(folder / policy, policy)
    try:
        service.start()
        service.set_capacity(NODES)
        job = service.submit(code, **given)
        view = service.wait(job, lambda it: began(it, NODES) is not None, f"{job} to train on {NODES} VMs")
        start = began(view, NODES)
        assert start is not None, "it was waited for"
        player = Player(service, job, market)
        view = player.play(start.at, window_s) | service.client.get(f"/jobs/{job}/vms")
        return Record(
            policy=policy,
            window_s=window_s,
            start=start,
            view=view,
            steps=service.client.get(f"/jobs/{job}/metrics")["metrics"],
            calibration=Measurements.from_json(service.client.get(f"/jobs/{job}/calibration")).at(
                MICROBATCH_SIZE
            ),
            played=player.played,
        )
    finally:
        service.close()
