"""What a process of `shape_forge` does: train as a rank of a plan, as the reference, or as a user would."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from makara.checkpoint import open_store
from makara.checkpoint.tensors import pack
from makara.model.data import Batches
from makara.model.partition.partition import Sections
from makara.model.training import Training
from makara.protocol.messages import GenerationOrder
from makara.worker.execution.buckets import buckets
from makara.worker.execution.commit import Flag
from makara.worker.execution.gloo import Listener
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.execution.stepper import Stepper
from makara.worker.recovery.joining import CheckpointLocation, join_generation
from makara.worker.sections.ranges import RangeRuntime
from reference import native_device, run_sections
from shapes import Question
from torch import Tensor, nn


def run_rank(
    question: Question,
    training: Training,
    chain: Sections,
    order: GenerationOrder,
    rank: int,
    listener: Listener | None,
    path: Path,
) -> None:
    """Form the generation and take its steps, as `worker.trainer.generation` does."""
    device = native_device()
    worker = order.members[rank].worker
    session = Session(order.told_to([worker]), worker, listener)
    sums = PartialSums(chain, question.num_micro_batches, question.numerics, device)
    state = ModelState(RangeRuntime(chain, training, question.seed, device), training.clip_grad_norm, sums)
    batches = _batches(question, training)
    session.rendezvous()
    parts = buckets(chain, session.plan)
    formed = join_generation(
        session, state, CheckpointLocation(open_store(path.parent.as_uri()), "job"), parts
    )
    assert (formed.rung, formed.step) == ("start", 0)
    stepper = Stepper(session, state, batches, parts, device)
    losses = [stepper.step(lambda: (1, Flag(0))).settled.loss for _ in range(question.steps)]
    tensors: dict[str, Tensor] = {}
    for section in state.runtime.sections.values():
        tensors |= section.state()[0]
    _leave(path, losses, tensors)


def run_reference_process(question: Question, training: Training, chain: Sections, path: Path) -> None:
    losses, state = run_sections(
        chain,
        training,
        microbatch_size=question.microbatch_size,
        num_micro_batches=question.num_micro_batches,
        steps=question.steps,
        seed=question.seed,
        numerics=question.numerics,
        device=native_device(),
    )
    _leave(path, losses, state)


def run_eager(question: Question, training: Training, chain: Sections, path: Path) -> None:
    """The user's module with gradient accumulation, one whole optimizer and a scheduler: plain PyTorch.

    Only the initial values and the choice of samples are Makara's. Running statistics, which an eager
    module moves with every micro-batch, take the mean of what each micro-batch makes of the step's first
    values: the one thing that is defined and not PyTorch's.
    """
    device = native_device()
    model = training.model().to(device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(chain.traced.initial(name))
    model.train()
    optimizer = training.optimizer(list(model.named_parameters()))
    schedule = training.schedule or (lambda step: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    batches = _batches(question, training)
    losses: list[float] = []
    for step in range(question.steps):
        before = _statistics(model)
        after: list[dict[str, Tensor]] = []
        total = weight = 0.0
        for i in range(question.num_micro_batches):
            model.load_state_dict(before, strict=False)
            batch = {name: value.to(device) for name, value in batches.micro_batch(step, i).items()}
            loss, share = _backward(training, model, batch)
            total, weight = total + loss, weight + share
            after.append(_statistics(model))
        model.load_state_dict({name: _mean([s[name] for s in after]) for name in before}, strict=False)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        if training.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total / weight)
    weights = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    _leave(path, losses, weights | {f"buffers/{name}": value for name, value in _statistics(model).items()})


def _backward(training: Training, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float]:
    wanted = inspect.signature(model.forward).parameters
    output = model(**{name: value for name, value in batch.items() if name in wanted})
    loss = training.loss(output, batch)
    value, weight = loss if isinstance(loss, tuple) else (loss, torch.tensor(1.0))
    value.backward()
    return float(value.detach()), float(weight)


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: saved[name].detach().clone() for name, _ in model.named_buffers() if name in saved}


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Counters moved by one in each: their mean is the step's, too."""
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)


def _batches(question: Question, training: Training) -> Batches:
    size = question.microbatch_size
    return Batches(training.dataset(), question.seed, size * question.num_micro_batches, size)


def _leave(path: Path, losses: Sequence[float], tensors: Mapping[str, Tensor]) -> None:
    path.with_suffix(".safetensors").write_bytes(pack(tensors, {"losses": json.dumps(losses)}))
