"""Workers of one plan played in one process, in any order: what a distributed run does, without the
network."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch
from makara.model.data import Batches, open_dataset
from makara.model.partition.partition import Sections
from makara.model.training import Training
from makara.worker.sections.buffer_updates import RunningSum
from makara.worker.sections.grad_check import is_usable, total_norm
from makara.worker.sections.grad_sums import clip_coefficient, mean_loss, new_sum
from makara.worker.sections.ranges import RangeRuntime
from reference import run_reference
from torch import Tensor

Ranges = Sequence[tuple[int, int]]
M, N, SEED = 2, 5, 11  # of the runs that are compared with the reference


def reference_of(
    training: Training, chain: Sections, numerics: Literal["exact", "fast"] = "exact", *, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """What the plain loop gives for these sections."""
    return run_reference(
        training,
        microbatch_size=M,
        num_micro_batches=N,
        cuts=chain.cuts,
        steps=steps,
        seed=SEED,
        numerics=numerics,
        precision=chain.traced.precision,
        graph_hash=chain.traced.graph_hash,
    )


class Workers:
    """Replicas, each a list of ranges that tile the sections; micro-batches are dealt to them at random."""

    def __init__(self, chain: Sections, training: Training, seed: int, global_batch_size: int) -> None:
        self.chain, self.training, self.seed = chain, training, seed
        m = chain.traced.microbatch_size
        self.batches = Batches(open_dataset(training, seed), seed, global_batch_size, m)
        self.replicas: list[list[RangeRuntime]] = []
        self.ranges: list[Ranges] = []
        self.attempts: list[int] = []  # that each step took
        self.skipped = 0  # steps whose gradient overflowed

    def form(self, replicas: Sequence[Ranges]) -> None:
        """Makes these workers; sections come from the present ones by their state, or else are
        initialised."""
        states = {
            index: section.state()
            for replica in self.replicas
            for worker in replica
            for index, section in worker.sections.items()
        }
        states = {
            index: ({n: t.clone() for n, t in tensors.items()}, s) for index, (tensors, s) in states.items()
        }
        self.ranges = list(replicas)
        self.replicas = [[self._worker(span, states) for span in ranges] for ranges in replicas]

    def _worker(
        self, span: tuple[int, int], states: dict[int, tuple[dict[str, Tensor], dict]]
    ) -> RangeRuntime:
        worker = RangeRuntime(self.chain, self.training, self.seed)
        for index in range(*span):
            section = worker.host(index, initialise=index not in states)
            if index in states:
                section.load_state(*states[index])
        return worker

    def step(self, step: int, shuffle: random.Random) -> float:
        """One step, with micro-batches in random order, on random replicas, recomputed at random."""
        scales = self._scales()
        self.attempts.append(0)
        loss_scale = self.replicas[0][0].loss_scale
        while True:
            self.attempts[-1] += 1
            pieces, sums, running = self._attempt(step, shuffle, scales)
            loss, weight = mean_loss([pieces[i] for i in sorted(pieces)])
            totals = [
                total.totals(weight * (1.0 if loss_scale is None else loss_scale.scale)) for total in sums
            ]
            overflow = any(total.overflowed for total in totals)
            scales = {name: scale for total in totals for name, scale in total.scales.items()}
            if not overflow or any(total.non_finite for total in totals):
                break
        gradients = {} if overflow else {n: g for total in totals for n, g in total.gradients.items()}
        found = {name: norm for total in totals for name, norm in total.norms().items()}
        norms = [found.get(name, 0.0) for name in self.chain.trainable_names]
        usable = is_usable(step, self.chain.trainable_names, norms, loss_scale)
        self.skipped += not usable
        clip = self.training.clip_grad_norm
        coefficient = None if clip is None else clip_coefficient(total_norm(norms), clip)
        for worker in [worker for replica in self.replicas for worker in replica]:
            for section in worker.sections.values():
                if usable:
                    section.apply(step, gradients, coefficient, running.finalise())
                section.scales = {name: scales[name] for name in section.info.trainable if name in scales}
                section.loss_scale = None if loss_scale is None else loss_scale.after(not usable)
        return loss

    def _scales(self) -> dict[str, float]:
        """As sections hold them: they travel with a section's state."""
        workers = [worker for replica in self.replicas for worker in replica]
        sections = [section for worker in workers for section in worker.sections.values()]
        return {name: scale for section in sections for name, scale in section.scales.items()}

    def _attempt(self, step: int, shuffle: random.Random, scales: dict[str, float]):
        names = list(self.chain.trainable_names)
        shuffle.shuffle(names)
        buckets = [names[start::3] for start in range(3)]
        count = self.batches.num_micro_batches
        parts = [
            [new_sum(self.chain, bucket, count, "exact") for bucket in buckets if bucket]
            for _ in self.replicas
        ]
        for sums in parts:
            for total in sums:
                total.reset(scales)
        changing = {name: self.chain.traced.tensors[name] for name in self.chain.updated_buffers}
        running = [RunningSum(changing, count) for _ in self.replicas]
        order = list(range(count))
        shuffle.shuffle(order)
        pieces: dict[int, tuple[float, float]] = {}
        for i in order:
            replica = shuffle.randrange(len(self.replicas))
            recompute = shuffle.random() < 0.5
            pieces[i] = self._micro_batch(
                step, i, replica, parts[replica], running[replica], recompute=recompute
            )
        for other in parts[1:]:  # the all-reduce
            for total, more in zip(parts[0], other, strict=True):
                total.buffer.add_(more.buffer)
                torch.maximum(total.maxima, more.maxima, out=total.maxima)
        for other in running[1:]:
            running[0].means += other.means
            running[0].counters += other.counters
        return pieces, parts[0], running[0]

    def _micro_batch(
        self, step: int, i: int, replica: int, sums, running: RunningSum, *, recompute: bool
    ) -> tuple[float, float]:
        ranges, workers = self.ranges[replica], self.replicas[replica]
        batch = self.batches.micro_batch(step, i)
        values: dict[str, Tensor] = {}
        piece = None
        for (start, stop), worker in zip(ranges, workers, strict=True):
            given = batch if worker.needs_batch(start, stop) else {}
            output = worker.forward(step, i, start, stop, values, given, keep=not recompute)
            values, piece = _sent(output.values), output.piece
            running.add(i, output.updates)
        assert piece is not None
        by_name = {name: total for total in sums for name in total.names}
        gradients: dict[str, Tensor] = {}
        for (start, _), worker in reversed(list(zip(ranges, workers, strict=True))):
            if recompute:
                worker.recompute(i, start)
            gradients = worker.backward(i, start, gradients, lambda _, name, g: by_name[name].add(name, g))
            gradients = _sent(gradients)
        return piece.loss_sum, piece.weight

    def state(self) -> dict[str, Tensor]:
        """All sections' state; every replica must hold the same."""
        merged: dict[str, Tensor] = {}
        for replica in self.replicas:
            for worker in replica:
                for section in worker.sections.values():
                    for name, tensor in section.state()[0].items():
                        assert name not in merged or same_bits(merged[name], tensor), (
                            f"replicas differ in {name}"
                        )
                        merged[name] = tensor.clone()
        return merged


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _sent(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As after a journey: new memory, badly aligned, as a slice of a received buffer may be."""
    received: dict[str, Tensor] = {}
    for name, value in values.items():
        buffer = torch.empty(value.numel() + 1, dtype=value.dtype)
        buffer[1:] = value.reshape(-1)
        received[name] = buffer[1:].view(value.shape)
    return received
