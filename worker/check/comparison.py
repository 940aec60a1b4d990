"""The dry run itself: step 0 of two micro-batches, of the user's module and in pieces, from the same initial
weights on the same data with the same random numbers, compared stage by stage.

Each stage is judged on the same inputs, so that one fault is told once: losses by micro-batch; gradients;
the buffers; the optimizers' updates from the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model.data import Batches
from ...model.partition.partition import Sections
from ...model.training import Training
from .eager import EagerModel, EagerResult
from .findings import NOISE, TOLERANCE, Finding, difference, differing, largest_magnitude, some
from .first_divergence import backward_hooks, first_difference
from .global_state import Watch
from .loss_recorder import LossListener
from .losses import check_calls, check_weights
from .random_numbers import FixedNumbers
from .rounding import LOSS, Allowance, Rounding, own_rounding
from .sectioned_step import Loaded, Pieces, StepInPieces

NUM_MICRO_BATCHES = 2  # the second shows what the first left behind


@dataclass
class Report:
    """What was compared. `largest`: the largest relative difference of each kind of tensor."""

    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])
    largest: dict[str, float] = field(default_factory=dict[str, float])
    random_operations: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


def watch_for(training: Training, folder: Path) -> Watch:
    """A watch over what the user's functions could keep between calls."""
    functions: dict[str, Callable[..., Any] | None] = {
        "Training.loss": training.loss,
        "Training.optimizer": training.optimizer,
        "Training.schedule": training.schedule,
    }
    return Watch(folder, functions)


def compare(
    training: Training, chain: Sections, batches: Batches, seed: int, watch: Watch, report: Report
) -> None:
    """Adds to `report`, which has the optimizer's findings already. `batches`: of two micro-batches.

    Raises the user's errors.
    """
    _Comparison(training, chain, batches, seed, watch, report).run()


class _Comparison:
    def __init__(
        self,
        training: Training,
        chain: Sections,
        batches: Batches,
        seed: int,
        watch: Watch,
        report: Report,
    ) -> None:
        self._training = training
        self._chain = chain
        self._read = batches
        self._batches = Loaded(batches)
        self._seed = seed
        self._watch = watch
        self._micro_batches = [self._batches.micro_batch(0, i) for i in range(NUM_MICRO_BATCHES)]
        self._report = report
        self._listener = LossListener(training.loss)
        self._plain: EagerResult | None = None
        self._allowance = Allowance(self._own_rounding)

    def run(self) -> None:
        self._check_data()
        # The pieces go first: afterwards the user's globals may hold values of the whole module.
        numbers = FixedNumbers()
        pieces = Pieces(self._chain, self._training, self._batches, self._seed)
        with numbers:
            ours = pieces.step()
        eager, theirs = self._run_eager(numbers)
        self._plain = theirs
        sound = self._compare_losses(eager, pieces, ours, theirs) and self._compare_gradients(
            eager, ours, theirs
        )
        self._compare_buffers(eager, ours, theirs)
        if sound:
            self._judge_loss(eager)
        self._compare_updates(eager, pieces, ours)
        self._report.random_operations = dict(numbers.counts)
        self._report.notes += self._allowance.notes

    def _own_rounding(self) -> Rounding:
        assert self._plain is not None, "the module ran before anything is compared with it"
        if self._watch.changed:
            return Rounding(unknown="a second run would begin from what the first one changed")
        floor = NOISE / TOLERANCE * largest_magnitude(self._plain.gradients.values())
        traced = self._chain.traced
        return own_rounding(self._training, traced, self._batches, self._seed, self._plain, floor)

    def _check_data(self) -> None:
        again = self._read.micro_batch(0, 0)
        changed = [name for name, value in self._micro_batches[0].items() if not _same(value, again[name])]
        if changed:
            self._find(
                "Training.dataset",
                f"entry {some(changed)} of a sample is another when the sample is read again: it draws from "
                "a generator or a counter of its own. Several workers read the same sample",
                "Draw from Python's, NumPy's or torch's global generators, which are seeded for each sample",
            )

    def _run_eager(self, numbers: FixedNumbers) -> tuple[EagerModel, EagerResult]:
        heard = replace(self._training, loss=self._listener)
        eager = EagerModel(heard, self._chain.traced, self._batches, seed=self._seed)
        before = {name: id(p) for name, p in eager.module.named_parameters(remove_duplicate=False)}
        with numbers, self._watch.over(eager.module):
            result = eager.step(0)
        after = {name: id(p) for name, p in eager.module.named_parameters(remove_duplicate=False)}
        moved = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if moved:
            self._find(
                "the model's forward",
                f"it replaces or ties the parameter {some(moved)}: an optimizer made before would go on with "
                "the old one",
                "Tie or replace parameters in the constructor, or in the function Training.model",
            )
        return eager, result

    def _compare_losses(
        self, eager: EagerModel, pieces: Pieces, ours: StepInPieces, theirs: EagerResult
    ) -> bool:
        self._report.findings += check_calls(self._listener)
        apart = [_apart(one, other) for one, other in zip(ours.pieces, theirs.pieces, strict=True)]
        self._report.largest["loss"] = max(apart)
        first = next((i for i, value in enumerate(apart) if value > TOLERANCE), None)
        if first is None or not self._allowance.beyond("loss", {LOSS: max(apart)}, lambda own: own.loss):
            return True
        if self._blamed("Training.loss"):
            return False
        fresh = EagerModel(self._training, self._chain.traced, self._batches, seed=self._seed)
        place = first_difference(
            fresh, self._chain.traced, pieces.weights(), self._micro_batches[: first + 1]
        )
        self._find(*self._explain_forward(first, ours, theirs, place and str(place)))
        return False

    def _explain_forward(
        self, i: int, ours: StepInPieces, theirs: EagerResult, place: str | None
    ) -> tuple[str, str, str]:
        said = f"the loss of micro-batch {i} is {_mean(theirs.pieces[i]):.7g} from your module and "
        said += f"{_mean(ours.pieces[i]):.7g} in pieces"
        if place is not None:
            said += f"; the first module with another output is {place}"
        changed = list(self._watch.changed)
        if changed:
            said += f". Forward changes {', '.join(changed[:4])}"
            remedy = (
                "Compute from arguments, parameters and buffers alone: return a value instead of storing it, "
                "and make state that training must keep a buffer"
            )
        elif i > 0:
            said += ", although that of the first is the same: the first left something behind"
            remedy = "Keep no state between calls of forward, except in buffers"
        else:
            remedy = (
                "Look there for what depends on more than its arguments: global settings, contexts such as "
                "torch.autocast, hooks, values computed in Python"
            )
        return "the model's forward", said, remedy

    def _compare_gradients(self, eager: EagerModel, ours: StepInPieces, theirs: EagerResult) -> bool:
        floor = NOISE / TOLERANCE * largest_magnitude(theirs.gradients.values())
        apart, worst = differing(ours.gradients, theirs.gradients, floor)
        self._report.largest["gradient"] = worst
        names = self._allowance.beyond("gradient", apart, lambda own: own.gradients)
        if not names:
            return True
        ordered = [name for name in self._chain.parameter_names if name in names]
        without = [name for name in ordered if name not in theirs.gradients]
        if without == ordered:
            self._find(
                "the model's forward",
                f"no gradient reaches {some(without)} in your module as it is, although its output depends "
                "on them. torch.utils.checkpoint(use_reentrant=True) does so where no argument requires a "
                "gradient",
                "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
            return False
        hooks = backward_hooks(eager.module)
        cause = f" Hooks would be lost: {some(hooks)}." if hooks else ""
        self._find(
            "the model's backward",
            f"the losses agree, but the gradients of {len(ordered)} parameters do not: {some(ordered)}. "
            f"The last of them in the model, {ordered[-1]!r}, is nearest to the cause.{cause} What autograd "
            "cannot see in a traced graph acts there: a backward hook, a custom backward"
            f"{self._allowance.doubt()}",
            "Express it with differentiable operations in forward",
        )
        return False

    def _compare_buffers(self, eager: EagerModel, ours: StepInPieces, theirs: EagerResult) -> None:
        if theirs.changed_by_backward:
            self._report.notes.append(
                f"backward changes the buffer {some(theirs.changed_by_backward)} once more, as activation "
                "checkpointing does around batch norm: your module alone counts each micro-batch twice "
                "there, Makara once"
            )
        initial = {name: self._chain.traced.initial(name) for name in theirs.buffers}
        changed = {name: value for name, value in theirs.buffers.items() if not _same(value, initial[name])}
        silent = [name for name in changed if name not in ours.buffers]
        if silent:
            self._find(
                "the model's forward",
                f"it changes the buffer {some(silent)}, and the sections would not",
                "Change it with operations on tensors in forward and declare it in Training.average_buffers, "
                "or leave it unchanged",
            )
        both = {name: value for name, value in theirs.buffers.items() if name in ours.buffers}
        floor = max(largest_magnitude(both.values()) * NOISE / TOLERANCE, 1e-30)
        apart, worst = differing(ours.buffers, both, floor)
        names = self._allowance.beyond("buffer", apart, lambda own: own.buffers)
        if both:
            self._report.largest["buffer"] = worst
        if names:
            self._find(
                "the model's forward",
                f"the buffer {some(names)} comes out otherwise in pieces, as the mean over micro-batches",
                "Update it from the micro-batch alone",
            )

    def _judge_loss(self, eager: EagerModel) -> None:
        sections = self._chain.sections
        last = next((s.trainable for s in reversed(sections) if s.trainable), ())
        if last:
            report = check_weights(self._training, eager, self._listener, last)
            self._report.findings += report.findings
            self._report.notes += report.notes

    def _compare_updates(self, eager: EagerModel, pieces: Pieces, ours: StepInPieces) -> None:
        """Both sides update from the gradients in pieces: rounding would be blown up by Adam's division."""
        before = {name: value.detach().clone() for name, value in pieces.weights().items()}
        eager.apply(0, EagerResult(0.0, ours.gradients, {}))
        pieces.apply(ours)
        whole = dict(eager.module.named_parameters())
        worst, names = 0.0, list[str]()
        for name, weight in pieces.weights().items():
            floor = float(before[name].abs().max()) if before[name].numel() else 0.0
            apart = difference(weight, whole[name], floor)
            worst = max(worst, apart)
            names += [name] if apart > TOLERANCE else []
        self._report.largest["weight after the step"] = worst
        if names and not self._blamed("Training.optimizer"):
            self._find(
                "Training.optimizer",
                f"one over the whole model and one per section update {some(names)} differently from the "
                "same gradients",
                "Keep all state in `self.state[parameter]`; let an update depend on its own parameter alone",
            )

    def _blamed(self, where: str) -> bool:
        return any(finding.where == where for finding in self._report.findings)

    def _find(self, where: str, differs: str, remedy: str) -> None:
        self._report.findings.append(Finding(where, differs, remedy))


def _mean(piece: tuple[float, float]) -> float:
    return piece[0] / piece[1] if piece[1] else piece[0]


def _apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The largest relative difference of sums and weights."""
    return max(
        difference(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for a, b in zip(one, other, strict=True)
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return difference(one, other) == 0.0
