"""Runs all sides of a comparison in one set of processes, taking turns, and times their steps."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from .sides import Setting, all_sides
from .wires import Emulation, install

MOST_S = 900.0  # a set of processes that takes longer hangs
_CLOSE = 1e-4  # relative, of the first steps' losses, which all sides compute from the same weights


def measure(setting: Setting, rounds: int, emulation: Emulation | None = None) -> dict[str, float]:
    """Median seconds of a step for each side, by name: the slowest rank's, over `rounds` steps each.

    The sides take turns, and a step of each that does not count comes first. Raises `RuntimeError` when a
    rank fails, or when the sides' losses are not the same.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    port = _free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, setting, rounds, emulation, results), daemon=True)
        for rank in range(setting.depth)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + MOST_S
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
    if failed:
        raise RuntimeError(f"ranks {failed} of {setting} failed or hung; their last words are above")
    return results.get()


def _rank(
    rank: int, port: int, setting: Setting, rounds: int, emulation: Emulation | None, results: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    wires = None if emulation is None else install(emulation, rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=setting.depth)
    sides = all_sides(setting, rank, "gloo" if wires is None else "wired")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    first_losses: list[float] = []
    for number in range(1 + rounds):
        for name, side in sides.items():
            dist.barrier()
            if wires is not None:
                wires.begin_step()
            began = time.monotonic()
            side.step()
            took = torch.tensor([time.monotonic() - began], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number > 0:
                seconds[name].append(float(took))
            else:
                first_losses.append(_known(side.loss))
    dist.barrier()
    if rank == 0:
        _check_same(dict(zip(sides, first_losses, strict=True)))
        results.put({name: statistics.median(values) for name, values in seconds.items()})
    os._exit(0)  # threads of both sides still wait for messages


def _known(loss: float) -> float:
    """The loss, which is NaN at ranks that do not know it."""
    shared = torch.tensor([-math.inf if math.isnan(loss) else loss], dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def _check_same(losses: dict[str, float]) -> None:
    expected = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - expected) <= _CLOSE * abs(expected):
            raise RuntimeError(f"{name}: the first step's loss is {loss}, the others' {expected}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
