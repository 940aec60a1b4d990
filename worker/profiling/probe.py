"""Links and sums between workers, measured by all of them together over the job's transport.

Every member runs the same script; whoever is being measured computes beside it, as in a step. Who is on
which VM follows from the names of workers. Everything here may block for ever on a member that is gone: it
runs on a helper thread that is given up when the manager says so.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...simulator.calibration.links import AllReduce, MeasuredWire
from ...simulator.calibration.statistics import Figure, summarise
from ..execution.communicator import OpenGroup
from ..execution.costs import all_at_once
from ..execution.gloo import ProcessGroup, Store

_ROUND_TRIPS = 40
_BULK_BYTES = 4 << 20
_SUM_BYTES = (1 << 16, 1 << 20, 8 << 20)
_LEAST_REPEATS, _MOST_REPEATS = 3, 9
_EACH_S = 0.4  # of repetitions of one measurement
_TOO_SLOW_S = 1.5  # larger sums than one that took so long are left out
_PAIRS = 2  # of workers on two VMs
_LOAD_SIZE, _LOAD_NICENESS = 256, 10

PING, BULK = 1, 2


@dataclass(frozen=True, slots=True)
class ProbedLinks:
    wires: tuple[MeasuredWire, ...] = ()
    allreduces: tuple[AllReduce, ...] = ()


def probe(store: Store, open_group: OpenGroup, rank: int, workers: Sequence[str]) -> ProbedLinks:
    """Measured together with all of `workers`, of which this is number `rank`; rank 0 gets what was found,
    the others nothing."""
    return _Script(store, open_group, rank, workers).run()


class _Script:
    """What each member does in one order; `_told` shares what a leader has decided or found."""

    def __init__(self, store: Store, open_group: OpenGroup, rank: int, workers: Sequence[str]) -> None:
        self._store = store
        self._open_group = open_group
        self._rank = rank
        self._vms = [worker.rpartition(".")[0] for worker in workers]

    def run(self) -> ProbedLinks:
        wires: list[MeasuredWire] = []
        sums: list[AllReduce] = []
        for number, pair in enumerate(pairs_of(self._vms)):
            found = self._told(f"wire/{number}", pair[0], lambda pair=pair, n=number: self._wire(pair, n))
            wires.append(MeasuredWire.from_json(found))
            self._meet(f"wire/{number}")
        for number, ring in enumerate(rings_of(self._vms)):
            found = self._told(f"ring/{number}", ring[0], lambda ring=ring, n=number: self._sums(ring, n))
            sums += [AllReduce.from_json(entry) for entry in found]
            self._meet(f"ring/{number}")
        return ProbedLinks(tuple(wires), tuple(sums)) if self._rank == 0 else ProbedLinks()

    def _wire(self, pair: Sequence[int], number: int) -> dict[str, Any] | None:
        """The first of the pair sends and measures; the second answers each message with one byte."""
        if self._rank not in pair:
            return None
        first, second = pair
        group = self._open_group(f"wire/{number}", pair)
        peer = second if self._rank == first else first
        byte, bulk = torch.zeros(1, dtype=torch.uint8), torch.zeros(_BULK_BYTES, dtype=torch.uint8)

        def send(tensor: torch.Tensor) -> float:
            began = time.perf_counter()
            if self._rank == first:
                group.send(tensor, peer, PING)
                group.receive(byte, peer, BULK)
            else:
                group.receive(tensor, peer, PING)
                group.send(byte, peer, BULK)
            return time.perf_counter() - began

        with _computing():
            send(byte)
            small = [send(byte) for _ in range(_ROUND_TRIPS)]
            large = self._repeated(f"bulk/{number}", first, lambda: send(bulk))
        if self._rank != first:
            return None
        latency = summarise([seconds / 2 for seconds in small])
        rates = [_BULK_BYTES / max(seconds - 2 * latency.median, 1e-6) for seconds in large]
        same_vm = self._vms[first] == self._vms[second]
        wire = MeasuredWire(
            same_vm=same_vm, latency_s=latency, bytes_per_s=summarise(rates), loaded=True, source="workers"
        )
        return wire.to_json()

    def _sums(self, ring: Sequence[int], number: int) -> list[dict[str, Any]] | None:
        if self._rank not in ring:
            return None
        groups = [self._open_group(f"ring/{number}/{index}", ring) for index in range(2)]
        with _computing():
            return self._sums_of(groups, ring, number)

    def _sums_of(
        self, groups: Sequence[ProcessGroup], ring: Sequence[int], number: int
    ) -> list[dict[str, Any]]:
        found: list[AllReduce] = []
        for size_bytes, in_flight in [*((size, 1) for size in _SUM_BYTES), (_SUM_BYTES[1], 2)]:
            if found and found[-1].seconds.median > _TOO_SLOW_S and in_flight == 1:
                continue  # every member has the same `found`: its leader's
            tensors = [torch.zeros(size_bytes // 4) for _ in range(in_flight)]

            def once(tensors: Sequence[torch.Tensor] = tensors) -> float:
                began = time.perf_counter()
                all_at_once([lambda g=g, t=t: g.sum(t) for g, t in zip(groups, tensors, strict=False)])
                return time.perf_counter() - began

            key = f"sum/{number}/{size_bytes}/{in_flight}"
            times = self._repeated(key, ring[0], once)
            figure = self._told(f"{key}/figure", ring[0], lambda t=times: summarise(t).to_json())
            found.append(
                AllReduce(
                    same_vm=len({self._vms[member] for member in ring}) == 1,
                    ring=len(ring),
                    size_bytes=size_bytes,
                    in_flight=in_flight,
                    seconds=Figure.from_json(figure),
                )
            )
        return [entry.to_json() for entry in found]

    def _repeated(self, key: str, leader: int, once: Callable[[], float]) -> list[float]:
        """As often as the leader's first run, which does not count, leaves time for."""
        first = once()
        wanted = min(_MOST_REPEATS, max(_LEAST_REPEATS, int(_EACH_S / max(first, 1e-9))))
        count: int = self._told(f"{key}/count", leader, lambda: wanted)
        return [once() for _ in range(count)]

    def _told(self, key: str, leader: int, find: Callable[[], Any]) -> Any:
        """What `find` gives on the leader; members run it as well."""
        own = find()
        if self._rank == leader:
            self._store.set(f"told/{key}", json.dumps(own))
            return own
        return json.loads(self._store.get(f"told/{key}"))

    def _meet(self, key: str) -> None:
        """Wait for all."""
        self._store.set(f"met/{key}/{self._rank}", "")
        self._store.wait([f"met/{key}/{rank}" for rank in range(len(self._vms))])


def pairs_of(vms: Sequence[str]) -> list[tuple[int, int]]:
    """Members to measure between, by number: two of one VM, and `_PAIRS` times two of different VMs, each
    worker in as few of them as can be."""
    pairs = list(itertools.combinations(range(len(vms)), 2))
    within = [pair for pair in pairs if vms[pair[0]] == vms[pair[1]]][:1]
    between: list[tuple[int, int]] = []
    for pair in (pair for pair in pairs if vms[pair[0]] != vms[pair[1]]):
        if len(between) < _PAIRS and not any(set(pair) & set(other) for other in between):
            between.append(pair)
    return [*within, *between]


def rings_of(vms: Sequence[str]) -> list[tuple[int, ...]]:
    """Groups to sum over: of one VM, and of one worker from each VM; two workers, and all that there are."""
    by_vm: dict[str, list[int]] = {}
    for number, vm in enumerate(vms):
        by_vm.setdefault(vm, []).append(number)
    largest = max(by_vm.values(), key=len)
    across = [members[0] for members in by_vm.values()]
    rings = [tuple(ring[:count]) for ring in (largest, across) for count in (2, len(ring)) if len(ring) >= 2]
    return list(dict.fromkeys(rings))


@contextmanager
def _computing() -> Generator[None]:
    """Matrix products on another thread, as a worker computes while its messages are under way.

    At a lower priority, where threads have one: a machine with more workers than processors would otherwise
    show how long a thread waits for its turn, and not what the link does.
    """
    ended = threading.Event()

    def compute() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOAD_NICENESS)
        values = torch.randn(_LOAD_SIZE, _LOAD_SIZE)
        while not ended.is_set():
            torch.mm(values, values)

    thread = threading.Thread(target=compute, name="probe-load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
