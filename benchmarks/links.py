"""Throughput over emulated links, both sides alike, and what the simulation says of Makara's step.

A tensor that crosses a cut holds the wire for 1.5 forwards, latency is 0.2 and the mean of an exponential
jitter 0.5 forward (see `wires.py` for all that is emulated). The simulation takes the times of sections that
`calibrate` measures in a process of its own, and the links as they are emulated.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from makara.pipeline.plan import Schedule
from makara.simulator import Calibration, Link, simulate

from .calibrate import calibrate
from .emulated.fleet import in_fresh_process
from .ranks import measure
from .report import Row
from .sides import SEED, Setting, plan_of, trace_chain
from .sleepy import training
from .wires import Emulation

TITLE = "over emulated links, P=4, N=32, window 4P (ratio: higher is faster; simulated over measured)"
ROUNDS = 5
FORWARD_S = 0.020
HELD, LATENCY, JITTER = 1.5, 0.2, 0.5  # forwards
SEEDS = 16  # of simulations; their mean counts


def rows() -> list[Row]:
    return [row(recompute) for recompute in (False, True)]


def row(recompute: bool) -> Row:
    setting = Setting(
        depth=4,
        num_micro_batches=32,
        forward_s=FORWARD_S,
        recompute=recompute,
        window=16,
        sides=("makara varuna", "torch GPipe", "torch 1F1B"),
    )
    emulation = Emulation(
        bytes_per_s=setting.cut_bytes / (HELD * FORWARD_S),
        latency_s=LATENCY * FORWARD_S,
        jitter_s=JITTER * FORWARD_S,
    )
    seconds = measure(setting, ROUNDS, emulation)
    ours = seconds["makara varuna"]
    predicted = simulated_s(setting, emulation)
    return {
        "recompute": recompute,
        **{f"{name} s": value for name, value in seconds.items()},
        "against GPipe": seconds["torch GPipe"] / ours,
        "against 1F1B": seconds["torch 1F1B"] / ours,
        "simulated s": predicted,
        "simulated / measured": predicted / ours,
    }


def simulated_s(setting: Setting, emulation: Emulation) -> float:
    """The mean of the simulated step over several draws of the jitter."""
    measured = in_fresh_process(calibrated, setting)
    link = Link(latency_s=emulation.latency_s, bytes_per_s=emulation.bytes_per_s, jitter_s=emulation.jitter_s)
    calibration = replace(measured, inter_vm=link, intra_vm=link)
    plan = plan_of(setting, Schedule.VARUNA)
    return statistics.mean(simulate(plan, calibration, seed=seed).time_s for seed in range(SEEDS))


def calibrated(setting: Setting) -> Calibration:
    torch.set_num_threads(1)
    return calibrate(
        trace_chain(setting),
        training(setting.num_blocks, setting.width, setting.block_s, setting.samples),
        seed=SEED,
        numerics="fast",
        num_micro_batches=setting.num_micro_batches,
    )
