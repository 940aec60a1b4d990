"""The dry run itself: step 0 of two micro-batches, of the user's module and in pieces, from the same initial
weights on the same data with the same random numbers, compared stage by stage.

Each stage is judged on the same inputs, so that one fault is told once: losses by micro-batch; gradients;
the buffers; the optimizers' updates from the same gradients. What differs is only blamed beyond rounding:
beyond what the user's own step differs by when its weights change by their last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ...model.data import Batches
from ...model.partition.partition import Sections, split
from ...model.tracing.scan import refuse_unheld
from ...model.training import Training
from .eager import CheckedStep, EagerModel
from .findings import TOLERANCE, Report, difference, differences, largest_magnitude, noise_floor, some
from .first_divergence import first_divergence
from .global_state import Watch
from .losses import LossRecorder, check_weights, checked_loss
from .random_numbers import FixedNumbers
from .sectioned_step import Loaded, SectionedModel

NUM_MICRO_BATCHES = 2  # the second shows what the first left behind
_FORWARD = "the model's forward"
_LOSS = "the micro-batches"
_TIMES = 4  # both sides are off, each in its own way; one way of one side is known
_OTHER_NUMBERS = 1e-2  # losses further apart than that are not of the same computation ...
_GROWTH = 16  # ... or than that many times the last bit of a type of few bits


def watch_for(training: Training, folder: Path) -> Watch:
    """A watch over what the user's functions could keep between calls."""
    named = ("loss", "optimizer", "schedule")
    return Watch(folder, {f"Training.{name}": getattr(training, name) for name in named})


class Comparison:
    """Adds to `report`, which has the optimizer's findings already.

    Raises the user's errors, when made and when run; `UntraceableModel` for hooks that the optimizer leaves.
    """

    def __init__(
        self, training: Training, chain: Sections, batches: Batches, seed: int, watch: Watch, report: Report
    ) -> None:
        """`batches`: of two micro-batches."""
        self._training = training
        self._chain = chain
        self._batches = Loaded(batches)
        self._seed = seed
        self._watch = watch
        self._report = report
        self._compare_data(batches)
        numbers, recorder = FixedNumbers(), LossRecorder(training.loss)
        # The pieces go first: afterwards the user's globals may hold values of the whole module.
        self._sections = SectionedModel(chain, checked_loss(training), self._batches, seed)
        with numbers:
            self._ours = self._sections.step()
        self._eager = EagerModel(replace(training, loss=recorder), chain.traced, self._batches, seed=seed)
        refuse_unheld(self._eager.module)  # the trace saw it without what the optimizer's function adds
        with numbers, watch.over(self._eager.module):
            self._theirs = self._eager.step(0)
        self._floor = noise_floor(self._theirs.gradients.values())
        self._buffer_floor = max(noise_floor(self._ours.buffers.values()), 1e-30)
        self._declares_weight = recorder.declares_weight
        recorder.blame(report)
        report.random_operations = dict(numbers.counts)

    def run(self) -> None:
        sound = self._compare_losses() and self._compare_gradients()
        self._note_zeros()
        self._compare_buffers()
        last = next((s.trainable for s in reversed(self._chain.sections) if s.trainable), ())
        if sound and last:
            wanted = [value for name, value in self._eager.module.named_parameters() if name in last]
            micro_batches = [self._batches.micro_batch(0, i) for i in range(NUM_MICRO_BATCHES)]
            check_weights(self._eager, micro_batches, self._declares_weight, wanted, self._report)
        self._compare_updates()

    def _compare_data(self, batches: Batches) -> None:
        once, again = self._batches.micro_batch(0, 0), batches.micro_batch(0, 0)
        changed = [name for name, value in once.items() if difference(value, again[name])]
        if changed:
            self._report.find(
                "Training.dataset",
                f"entry {some(changed)} of a sample is another when the sample is read again: it draws from "
                "a generator or a counter of its own. Several workers read the same sample",
                "Draw from Python's, NumPy's or torch's global generators, which are seeded for each sample",
            )

    def _compare_losses(self) -> bool:
        """Whether they agree."""
        apart = _losses_apart(self._ours, self._theirs)
        if not self._beyond_rounding("loss", {_LOSS: max(apart)}):
            return True
        if self._report.blames("Training.loss"):
            return False
        first = next(i for i, value in enumerate(apart) if value > TOLERANCE)
        fresh = EagerModel(self._training, self._chain.traced, self._batches, seed=self._seed)
        calls = [self._batches.micro_batch(0, i) for i in range(first + 1)]
        place = first_divergence(fresh, self._chain.traced, self._sections.weights(), calls)
        said = f"the loss of micro-batch {first} is {_mean(self._theirs, first):.7g} from your module and "
        said += f"{_mean(self._ours, first):.7g} in pieces"
        if place is not None:
            said += f"; the first module with another output is {place}"
        if changed := list(self._watch.changed):
            said += f". Forward changes {', '.join(changed[:4])}"
            remedy = (
                "Compute from arguments, parameters and buffers alone: return a value instead of storing it, "
                "and make state that training must keep a buffer"
            )
        elif self._varies:
            said += ". Your module alone gives another loss when the same step is run again, with the same "
            said += "random numbers of torch: it reads a clock, a counter, or a generator that is not torch's"
            remedy = "Compute from arguments, parameters and buffers alone; draw with torch's generators"
        elif first > 0:
            said += ", although that of the first is the same: the first left something behind"
            remedy = "Keep no state between calls of forward, except in buffers"
        else:
            remedy = (
                "Look there for what depends on more than its arguments: global settings, contexts such as "
                "torch.autocast, hooks, values computed in Python"
            )
        self._report.find(_FORWARD, said, remedy)
        return False

    def _compare_gradients(self) -> bool:
        """Whether they agree."""
        apart = differences(self._ours.gradients, self._theirs.gradients, self._floor)
        beyond = self._beyond_rounding("gradient", apart)
        names = [name for name in self._chain.parameter_names if name in beyond]
        if not names:
            return True
        if not any(name in self._theirs.gradients for name in names):
            self._report.find(
                _FORWARD,
                f"no gradient reaches {some(names)} in your module as it is, although its output depends on "
                "them. torch.utils.checkpoint(use_reentrant=True) does so where no argument requires a "
                "gradient",
                "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
            return False
        cause, remedy = self._cause_of_gradients(names)
        self._report.find(
            "the model's backward",
            f"the losses agree, but the gradients of {len(names)} parameters do not: {some(names)}. {cause}",
            remedy,
        )
        return False

    def _cause_of_gradients(self, names: Sequence[str]) -> tuple[str, str]:
        """(what makes them differ, what to do), by experiment: the module once more; one section, uncut."""
        theirs = {name: self._theirs.gradients[name] for name in names if name in self._theirs.gradients}
        again = differences(theirs, {n: self._again.gradients[n] for n in theirs}, self._floor)
        if max(again.values(), default=0.0) > TOLERANCE:
            return (
                "Your module's own differ when the same step is run again: its backward draws random "
                "numbers, keeps state, or runs an operation that is not deterministic",
                "Make the backward a function of its arguments; a custom operation must add in a fixed order",
            )
        one = split(self._chain.traced, [])
        whole = SectionedModel(one, checked_loss(self._training), self._batches, self._seed)
        with FixedNumbers():
            uncut = whole.step().gradients
        apart = differences({n: uncut[n] for n in theirs if n in uncut}, theirs, self._floor)
        if max(apart.values(), default=0.0) <= TOLERANCE and self._chain.num_sections > 1:
            return (
                "In one section they agree, so the cuts make the difference, not your code: an operation "
                f"before a cut, near {names[-1]!r}, depends on the memory layout of its gradient",
                "Please report it; parallelism.num_sections: 1 trains the model right, and Training.cuts may "
                "put the cuts elsewhere",
            )
        return (
            f"The last of them in the model, {names[-1]!r}, is nearest to the cause. One section without "
            "cuts differs as well, and your module gives the same gradients twice: what autograd cannot see "
            "in a traced graph acts there, such as a custom backward",
            "Express it with differentiable operations in forward",
        )

    @cached_property
    def _again(self) -> CheckedStep:
        """The user's module once more."""
        with FixedNumbers():
            return self._eager.step(0)

    @property
    def _varies(self) -> bool:
        return max(_losses_apart(self._again, self._theirs)) > TOLERANCE

    def _note_zeros(self) -> None:
        """Where the loss looks at values, all outputs are taken to be used (`outputs_with_gradient`)."""
        ours, theirs = self._ours.gradients, self._theirs.gradients
        names = [name for name in ours if name not in theirs and not ours[name].any()]
        if names:
            self._report.notes.append(
                f"no gradient reaches {some(names)} in your module as it is, so an optimizer leaves them "
                "alone. In pieces their gradient is zero, and weight decay moves them: the loss looks at "
                "values, so that which outputs it uses is not known beforehand. Freeze them "
                "(requires_grad_(False)) if they are not to be trained"
            )

    def _compare_buffers(self) -> None:
        theirs = self._theirs.buffers
        if again := sorted(self._eager.changed_by_backward):
            self._report.notes.append(
                f"backward changes the buffer {some(again)} once more, as activation checkpointing does "
                "around batch norm: your module alone counts each micro-batch twice there, Makara once"
            )
        changed = dict(self._ours.buffers)
        for name in theirs.keys() - changed.keys():
            initial = self._chain.traced.initial(name)
            if difference(initial, theirs[name]):
                changed[name] = initial  # the sections leave it
        apart = differences(changed, {name: theirs[name] for name in changed}, self._buffer_floor)
        if names := self._beyond_rounding("buffer", apart):
            self._report.find(
                _FORWARD,
                f"the buffer {some(names)} comes out otherwise in pieces, where it is the mean over "
                "micro-batches, or stays",
                "Change it with operations on tensors in forward, from the micro-batch alone, and declare it "
                "in Training.average_buffers",
            )

    def _compare_updates(self) -> None:
        """Both sides update from the gradients in pieces: rounding would be blown up by Adam's division."""
        floors = {name: largest_magnitude([value]) for name, value in self._sections.weights().items()}
        with FixedNumbers():  # both draw the same random numbers
            self._eager.apply(0, self._ours.gradients, {})
            self._sections.apply(self._ours)
        whole = dict(self._eager.module.named_parameters())
        apart = {
            name: difference(value, whole[name], floors[name])
            for name, value in self._sections.weights().items()
        }
        self._report.largest["weight after the step"] = max(apart.values(), default=0.0)
        names = [name for name, value in apart.items() if value > TOLERANCE]
        if names and not self._report.blames("Training.optimizer"):
            self._report.find(
                "Training.optimizer",
                f"one over the whole model and one per section update {some(names)} differently from the "
                "same gradients",
                "Keep all state in `self.state[parameter]`; let an update depend on its own parameter alone",
            )

    def _beyond_rounding(self, kind: str, apart: Mapping[str, float]) -> list[str]:
        """The names that differ by more than `TOLERANCE` and than rounding explains, which is noted."""
        if apart:
            self._report.largest[kind] = max(apart.values())
        names = [name for name, value in apart.items() if value > TOLERANCE]
        if not names:
            return []
        own = self._rounding[kind]
        left = [name for name in names if apart[name] > _TIMES * own.get(name, 0.0)]
        passed = [name for name in names if name not in left]
        if passed:
            name = max(passed, key=lambda name: apart[name])
            self._report.notes.append(
                f"the {kind} of {some(passed)} differs by up to {apart[name]:.1g}, which is rounding: your "
                f"module's own moves by {own[name]:.1g} when its weights change by their last bit"
            )
        return left

    @cached_property
    def _rounding(self) -> dict[str, Mapping[str, float]]:
        """By kind: what the user's own step differs by when its weights change by their last bit."""
        found: dict[str, Mapping[str, float]] = {"loss": {}, "gradient": {}, "buffer": {}}
        if self._watch.changed:
            return found  # a second run would begin from what the first one changed
        again = differences(self._again.gradients, self._theirs.gradients, self._floor)
        if self._varies or max(again.values(), default=0.0) > _OTHER_NUMBERS:
            return found  # the module is not the same function twice, so a third run would tell nothing
        largest_move = self._eager.move_last_bits()
        with FixedNumbers():
            moved = self._eager.step(0)
        self._eager.load_initial()
        loss = max(_losses_apart(moved, self._theirs))
        if loss > max(_OTHER_NUMBERS, _GROWTH * largest_move):
            return found
        gradients = differences(moved.gradients, self._theirs.gradients, self._floor)
        buffers = differences(moved.buffers, self._theirs.buffers, self._buffer_floor)
        found["loss"] = {_LOSS: loss}
        found["gradient"] = {name: value for name, value in gradients.items() if math.isfinite(value)}
        found["buffer"] = {name: value for name, value in buffers.items() if math.isfinite(value)}
        return found


def _losses_apart(one: CheckedStep, other: CheckedStep) -> list[float]:
    """Of each micro-batch, the larger relative difference of sum and weight."""

    def apart(a: float, b: float) -> float:
        return difference(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))

    pairs = zip(one.losses, other.losses, strict=True)
    return [max(apart(a[0], b[0]), apart(a[1], b[1])) for a, b in pairs]


def _mean(result: CheckedStep, i: int) -> float:
    total, weight = result.losses[i]
    return total / weight if weight else total
