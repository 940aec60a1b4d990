"""Trainers in network namespaces of their own, and links between them that are cut while both ends live.

Run by `test_cut_links.py` as `unshare -rn python cut_links.py SCENARIO FOLDER`: so it needs no rights, and
what it does to the network ends with it. A link is cut by giving each end a wrong hardware address for the
other: what they send is lost without a word.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from makara.checkpoint import open_generation, open_store
from makara.model.training import load_entrypoint
from makara.pipeline import Plan, Range, grid
from makara.protocol.messages import Phase
from makara.worker.profiling.profiling import profile
from trainer_processes import BUNDLE, Fleet, settings

NOBODY = "02:00:00:00:00:99"


def ip(*arguments: str, inside: int | None = None) -> None:
    where = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    subprocess.run([*where, "ip", *arguments], check=True)


class Network:
    """Workers on one bridge, each in a namespace that a sleeping process holds."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.addresses = {worker: f"10.77.0.{number}" for number, worker in enumerate(workers, 1)}
        self.holders: dict[str, int] = {}
        ip("link", "set", "lo", "up")
        ip("link", "add", "hub", "type", "bridge")
        ip("link", "set", "hub", "up")
        for worker in workers:
            self._add(worker)

    def _add(self, worker: str) -> None:
        pid = self._hold()
        self.holders[worker] = pid
        ip("link", "add", f"hub-{worker}", "type", "veth", "peer", "name", "wire")
        ip("link", "set", f"hub-{worker}", "master", "hub", "up")
        ip("link", "set", "wire", "netns", str(pid))
        ip("addr", "add", f"{self.addresses[worker]}/24", "dev", "wire", inside=pid)
        ip("link", "set", "wire", "up", inside=pid)
        ip("link", "set", "lo", "up", inside=pid)

    @staticmethod
    def _hold() -> int:
        process = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{process.pid}/ns/net") == own:
            time.sleep(0.005)
        return process.pid

    def cut(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            neighbour = (self.addresses[there], "lladdr", NOBODY, "nud", "permanent", "dev", "wire")
            ip("neigh", "replace", *neighbour, inside=self.holders[here])


class Run:
    """A job of three stages on workers that are linked by a network that can be cut."""

    def __init__(self, folder: Path) -> None:
        self.workers = ["a", "b", "c"]
        self.network = Network(self.workers)
        self.job = settings(folder, steps=100_000)
        recipe = profile(load_entrypoint(BUNDLE, self.job.entrypoint), self.job).recipe
        self.num_sections, self.num_micro_batches = recipe.num_sections, recipe.num_micro_batches
        self.fleet = Fleet(folder, self.job, recipe, self.network.addresses, self.network.holders)
        self.fleet.link_timeout_s = 4.0
        self.fleet.start(*self.workers)

    def plan(self, generation: int, *cuts: int) -> Plan:
        open_generation(open_store(self.job.store.uri), self.job.job, generation)
        stages = [Range(start, stop) for start, stop in pairwise([0, *cuts, self.num_sections])]
        return grid(stages, 1, self.num_micro_batches, generation=generation)

    def goes_on_without(self, left_out: str, generation: int) -> None:
        """The others form the next generation and take a step."""
        others = [worker for worker in self.workers if worker != left_out]
        self.fleet.abandon(generation - 1, *self.workers)
        self.fleet.form(self.plan(generation, 4), others)
        self.fleet.wait_step(self.fleet.reports[others[0]].step + 1, others[0])


def never_formed(run: Run) -> None:
    """Two members that cannot reach each other say so, and the third accuses nobody."""
    run.network.cut("a", "b")
    run.fleet.prepare(run.plan(1, 2, 5), ["c", "a", "b"])
    run.fleet.go(1)
    run.fleet.wait_phase(Phase.BROKEN, "a", "b", "c")
    assert [run.fleet.reports[worker].lost for worker in "abc"] == [["b"], ["a"], []]
    run.goes_on_without("b", 2)


def cut_in_a_step(run: Run) -> None:
    """A link that is cut while a generation steps is noticed by both of its ends, and by nobody else."""
    run.fleet.form(run.plan(1, 2, 5), ["c", "a", "b"])
    run.fleet.wait_step(2, "a")
    run.network.cut("a", "b")
    run.fleet.wait_phase(Phase.BROKEN, "a", "b")
    assert [run.fleet.reports[worker].lost for worker in "ab"] == [["b"], ["a"]]
    assert run.fleet.reports["c"].lost == []
    run.goes_on_without("b", 2)


SCENARIOS: dict[str, Callable[[Run], None]] = {"never-formed": never_formed, "cut-in-a-step": cut_in_a_step}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Run]:
    run = Run(folder)
    try:
        yield run
    finally:
        run.fleet.close()
        for pid in run.network.holders.values():
            os.kill(pid, 9)


if __name__ == "__main__":
    with running(Path(sys.argv[2])) as made:
        SCENARIOS[sys.argv[1]](made)
