"""Emulated links for both sides of a comparison, in one place: `WiredGloo`, a gloo group with slow wires.

What is emulated. Each direction of each pair of ranks is one wire, shared by all groups of the process. A
tensor holds it for size / bandwidth, in the order of sending; it arrives one latency and one exponential
draw of jitter after that, but never before the one sent ahead of it. The sender's work is complete when the
wire has taken the tensor, as with a socket. An all-reduce takes the 2(G-1) hops of a ring, each a latency, a
draw of jitter and its share of the bytes, and then happens. Jitter is a function of (source, destination,
number of the message in this step), so that both sides meet the same. Bytes really travel over loopback.

`torch.distributed` reaches its backend from C++, so it is given the group as a Python `ProcessGroup`
(backend "wired"); Makara makes its groups as `torch.distributed.ProcessGroupGloo`, and finds `WiredGloo`
there after `install`. Checked with torch 2.13.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_Gloo: Any = dist.ProcessGroupGloo


@dataclass(frozen=True, slots=True)
class Emulation:
    """One directed link: seconds and bytes a second; `jitter_s` is the mean of an exponential."""

    bytes_per_s: float
    latency_s: float
    jitter_s: float


class Wires:
    """The outgoing wires of one rank; `link_to` tells what the one to each other rank is like."""

    def __init__(self, link_to: Callable[[int], Emulation], rank: int) -> None:
        self.rank = rank
        self.sent_bytes = 0
        """In messages and in all-reduces, since the beginning."""
        self._link_to = link_to
        self._wires: dict[int, _Wire] = {}
        self._collectives = 0

    def begin_step(self) -> None:
        """Count messages from zero again; the last step's have all been received."""
        self._collectives = 0
        for wire in self._wires.values():
            wire.begin_step()

    def send(self, group: Any, tensor: torch.Tensor, destination: int, tag: int) -> Taken:
        if destination not in self._wires:
            self._wires[destination] = _Wire(self._link_to(destination), self.rank, destination)
        self.sent_bytes += tensor.nbytes
        return self._wires[destination].send(group, tensor, tag)

    def hold_collective(self, link: Emulation, size_bytes: int, num_ranks: int) -> None:
        """Sleep as long as a ring of `num_ranks` takes over links like this one."""
        hops = 2 * (num_ranks - 1)
        jitter_s = _jitter_s(link, f"all-reduce {self._collectives}", hops)
        self._collectives += 1
        self.sent_bytes += hops * size_bytes // num_ranks
        time.sleep(hops * (link.latency_s + size_bytes / num_ranks / link.bytes_per_s) + jitter_s)

    def close(self) -> None:
        """Let the wires' threads end."""
        for wire in self._wires.values():
            wire.close()


class Taken:
    """A send that is complete when the wire has taken the tensor."""

    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self, timeout: Any = None) -> bool:
        _sleep_until(self._at)
        return True


class _Wire:
    """One direction of a pair; a thread hands each tensor to gloo at the time of its arrival."""

    def __init__(self, emulation: Emulation, source: int, destination: int) -> None:
        self._emulation = emulation
        self._name = f"{source} to {destination}"
        self._destination = destination
        self._lock = threading.Lock()
        self._free_at = self._last_arrival = 0.0
        self._sent = 0
        self._on_the_way: queue.SimpleQueue[tuple[float, Any, torch.Tensor, int] | None] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[tuple[Any, torch.Tensor]] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, name=f"wire {self._name}", daemon=True).start()

    def begin_step(self) -> None:
        while not self._given.empty():
            work, _ = self._given.get()
            work.wait()
        self._sent = 0

    def send(self, group: Any, tensor: torch.Tensor, tag: int) -> Taken:
        link = self._emulation
        kept = tensor.detach().clone()  # after `Taken` the sender may write to its own
        with self._lock:
            jitter_s = _jitter_s(link, f"{self._name}, message {self._sent}")
            self._sent += 1
            self._free_at = max(self._free_at, time.monotonic()) + kept.nbytes / link.bytes_per_s
            arrival = self._free_at + link.latency_s + jitter_s
            self._last_arrival = max(self._last_arrival, arrival)
            self._on_the_way.put((self._last_arrival, group, kept, tag))
            return Taken(self._free_at)

    def close(self) -> None:
        self._on_the_way.put(None)

    def _deliver(self) -> None:
        while (item := self._on_the_way.get()) is not None:
            at, group, tensor, tag = item
            _sleep_until(at)
            self._given.put((_Gloo.send(group, [tensor], self._destination, tag), tensor))


class WiredGloo(_Gloo):
    """Gloo whose sends and all-reduces go over emulated links: those that were attached when it was made."""

    wires: Wires
    ring: Emulation

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wires, self._ring = WiredGloo.wires, WiredGloo.ring

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Taken:
        (tensor,) = tensors
        return self._wires.send(self, tensor, destination, tag)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._wires.hold_collective(self._ring, tensors[0].nbytes, self.size())
        return super().allreduce(tensors, options)


class _WiredGroup(dist.ProcessGroup):
    """What `torch.distributed` calls: a group in Python that hands everything to `WiredGloo`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = WiredGloo(store, rank, size, timeout)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Any:
        return self._gloo.send(tensors, destination, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def getBackendName(self) -> str:
        return "wired"


def install(emulation: Emulation, rank: int) -> Wires:
    """Give this process slow wires, all alike, for Makara's groups and for the backend "wired"."""
    wires = Wires(lambda _: emulation, rank)
    attach(wires, emulation)
    dist.Backend.register_backend("wired", _WiredGroup, devices=["cpu"])
    return wires


def attach(wires: Wires, ring: Emulation) -> None:
    """Groups that Makara makes from now on have these wires, and all-reduce over a ring of such links."""
    WiredGloo.wires, WiredGloo.ring = wires, ring
    dist.ProcessGroupGloo = WiredGloo


def detach() -> None:
    """Groups that Makara makes from now on are gloo's own."""
    dist.ProcessGroupGloo = _Gloo


def _jitter_s(link: Emulation, what: str, hops: int = 1) -> float:
    if not link.jitter_s:
        return 0.0
    draw = random.Random(what)
    return sum(draw.expovariate(1 / link.jitter_s) for _ in range(hops))


def _sleep_until(at: float) -> None:
    """Until `at` on the monotonic clock; at once when that is past."""
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)
