"""The two sides of the comparison on one rank: Makara's worker, and `torch.distributed.pipelining`.

Both run the blocks of `sleepy.Chain` with the same initial weights and the same SGD. A step of Makara's is
the trainer's whole step: reading samples, all operations, the tally of losses, the commit with the gradient
norm, the optimizer. A step of theirs is `schedule.step` on samples that are there, and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from makara.model.data import Batches
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import Sections, split
from makara.model.tracing.trace import trace
from makara.pipeline import Plan, Schedule, grid
from makara.protocol.messages import GenerationOrder, Member
from makara.worker.execution.buckets import buckets
from makara.worker.execution.commit import Flag
from makara.worker.execution.gloo import Listener
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.execution.stepper import Stepper
from makara.worker.sections.ranges import RangeRuntime
from torch import fx, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint

from .made_up import stages
from .sleepy import Chain, Points, training

SEED = 3
SIDES = ("makara varuna", "torch GPipe", "makara gpipe", "torch 1F1B", "makara 1f1b")
HALVES = "makara varuna, halves"
"""The side whose backwards are in halves, as those of PyTorch's zero-bubble schedules."""


@dataclass(frozen=True, slots=True)
class _TheirSchedule:
    """One of PyTorch's schedules. With two stages a rank, rank r has r and P+r, in a V r and 2P-1-r."""

    schedule: type[Any]
    stages_per_rank: int = 1
    is_v: bool = False

    def stages_of(self, rank: int, depth: int) -> list[int]:
        if self.is_v:
            return [rank, 2 * depth - 1 - rank]
        return [turn * depth + rank for turn in range(self.stages_per_rank)]


_THEIRS = {
    "torch GPipe": _TheirSchedule(ScheduleGPipe),
    "torch 1F1B": _TheirSchedule(Schedule1F1B),
    "torch zero bubble": _TheirSchedule(ScheduleInterleavedZeroBubble),
    "torch LoopedBFS": _TheirSchedule(ScheduleLoopedBFS, 2),
    "torch Interleaved1F1B": _TheirSchedule(ScheduleInterleaved1F1B, 2),
    "torch InterleavedZeroBubble": _TheirSchedule(ScheduleInterleavedZeroBubble, 2),
    "torch ZBVZeroBubble": _TheirSchedule(ScheduleZBVZeroBubble, 2, is_v=True),
    "torch DualPipeV": _TheirSchedule(ScheduleDualPipeV, 2, is_v=True),
}
ONE_STAGE_A_RANK = tuple(name for name, their in _THEIRS.items() if their.stages_per_rank == 1)
TWO_STAGES_A_RANK = tuple(name for name in _THEIRS if name not in ONE_STAGE_A_RANK)


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides have alike. `forward_s`: of one stage and micro-batch; a backward takes twice that.

    `window` is of Varuna's schedule; GPipe has none, as theirs, and 1F1B its own.
    """

    depth: int
    num_micro_batches: int
    forward_s: float
    recompute: bool
    window: int | None = None
    sides: tuple[str, ...] = SIDES
    blocks_per_stage: int = 2
    width: int = 64
    microbatch_size: int = 4

    @property
    def num_blocks(self) -> int:
        return self.depth * self.blocks_per_stage

    @property
    def block_s(self) -> float:
        return self.forward_s / self.blocks_per_stage

    @property
    def samples(self) -> int:
        return self.num_micro_batches * self.microbatch_size

    @property
    def cut_bytes(self) -> int:
        return self.microbatch_size * self.width * 4


def plan_of(setting: Setting, schedule: Schedule, *, halves: bool = False) -> Plan:
    """One pipeline of equal stages; each block is a section."""
    return grid(
        stages(setting.num_blocks, setting.depth),
        1,
        setting.num_micro_batches,
        schedule=schedule,
        window=setting.window if schedule is Schedule.VARUNA else None,
        recompute=setting.recompute,
        halves=halves,
        generation=1,
    )


class Ours:
    """Makara's executor, lanes and stepper, as a trainer uses them, under one plan."""

    def __init__(self, setting: Setting, plan: Plan, rank: int, chain: Sections) -> None:
        listener = Listener("127.0.0.1") if rank == 0 else None
        shared: list[str | None] = [listener.endpoint if listener else None]
        dist.broadcast_object_list(shared)
        order = GenerationOrder.of(
            [Member(worker=str(index), address="127.0.0.1") for index in range(setting.depth)],
            plan.to_json(),
            number=1,
            phase="go",
            endpoint=shared[0],
        )
        job = training(setting.num_blocks, setting.width, setting.block_s, setting.samples)
        sums = PartialSums(chain, plan.num_micro_batches, "fast")
        state = ModelState(RangeRuntime(chain, job, SEED), None, sums)
        for index in plan.ranges[rank].sections:
            state.runtime.host(index)
        state.applied = 0
        session = Session(order, str(rank), listener)
        parts = buckets(chain, plan)
        session.rendezvous()
        session.open_groups(parts)
        batches = Batches(job.dataset(), SEED, setting.samples, setting.microbatch_size)
        self._stepper = Stepper(session, state, batches, parts, torch.device("cpu"))
        self.loss = float("nan")

    def step(self) -> None:
        self.loss = self._stepper.step(lambda: (1, Flag(0))).settled.loss


class Theirs:
    """`PipelineStage`s under one of PyTorch's schedules; recomputation by `torch.utils.checkpoint`."""

    def __init__(
        self, setting: Setting, their: _TheirSchedule, rank: int, chain: Sections, group: Any
    ) -> None:
        depth = setting.depth
        num_stages = depth * their.stages_per_rank
        indices = their.stages_of(rank, depth)
        modules = [_Stage(setting, index, num_stages, chain) for index in indices]
        self._first, self._last = 0 in indices, num_stages - 1 in indices
        self._optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.01)
        points = Points(setting.samples, setting.width)
        batch = Batches(points, SEED, setting.samples, setting.samples).micro_batch(0, 0)
        self._x, self._y = batch["x"], batch["y"]
        example = self._x[: setting.microbatch_size]
        stages = [
            PipelineStage(
                module,
                index,
                num_stages,
                torch.device("cpu"),
                input_args=example.clone().requires_grad_(index > 0),
                output_args=example.clone().requires_grad_(),
                group=group,
            )
            for index, module in zip(indices, modules, strict=True)
        ]
        alone = issubclass(their.schedule, PipelineScheduleSingle)
        self._schedule = their.schedule(
            stages[0] if alone else stages, setting.num_micro_batches, loss_fn=F.mse_loss
        )
        self.loss = float("nan")

    def step(self) -> None:
        """`loss` is known where the last stage is."""
        inputs = [self._x] if self._first else []
        losses: list[torch.Tensor] = []
        if self._last:
            self._schedule.step(*inputs, target=self._y, losses=losses, return_outputs=False)
            self.loss = float(torch.stack([loss.detach() for loss in losses]).mean())
        else:
            self._schedule.step(*inputs)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Stage(nn.Module):
    """A stage's blocks, with the weights that Makara gives them at the start."""

    def __init__(self, setting: Setting, index: int, num_stages: int, chain: Sections) -> None:
        super().__init__()
        whole = Chain(setting.num_blocks, setting.width, setting.block_s)
        whole.load_state_dict({name: chain.traced.initial(name) for name in chain.parameter_names})
        size = setting.num_blocks // num_stages
        self.blocks = whole.blocks[index * size : (index + 1) * size]
        self._recompute = setting.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self._recompute else self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trace_chain(setting: Setting) -> Sections:
    """The model as sections, one for each block."""
    job = training(setting.num_blocks, setting.width, setting.block_s, setting.samples)
    traced = trace(job, setting.microbatch_size, SEED)
    ends = [place for place, node in enumerate(compute_nodes(traced.graph)) if _is_nap(node)]
    return split(traced, [end + 1 for end in ends[:-1]])


def _is_nap(node: fx.Node) -> bool:
    return node.target is torch.ops.makara_benchmarks.nap.default


def all_sides(setting: Setting, rank: int, backend: str) -> dict[str, Ours | Theirs]:
    """Every side of the comparison on this rank, by name, in the order in which their steps take turns.

    `backend` is the one that `torch.distributed.pipelining` sends by.
    """
    group = dist.new_group(backend=backend)
    chain = trace_chain(setting)
    return {
        name: Theirs(setting, _THEIRS[name], rank, chain, group)
        if name in _THEIRS
        else Ours(setting, _our_plan(setting, name), rank, chain)
        for name in setting.sides
    }


def _our_plan(setting: Setting, side: str) -> Plan:
    if side == HALVES:
        return plan_of(setting, Schedule.VARUNA, halves=True)
    return plan_of(setting, Schedule(side.removeprefix("makara ")))
