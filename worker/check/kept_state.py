"""Whether a section's optimizer goes on as it was after its state was saved and loaded into a new one.

When a section moves, or its VM dies, a new optimizer gets the state of the old one: what a section's state
holds (`sections/state.py`), and nothing else. Two optimizers take the same steps from there, the old one and
the new one: their weights must agree, and so must everything that the old one reaches and has changed. A hook
that changes nothing of the optimizer may keep what it likes, as it only watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...model.errors import UserCodeError
from ...model.seeds import preserved_randomness, seed64, seed_everything
from ...model.torch_private.optimizer_hooks import num_writes, step_hooks
from ...model.training import Training, call_user_code
from .findings import Report, some
from .reachable import Value, reachable
from .small_optimizers import (
    NUM_STEPS,
    SEQUENCES,
    Gradient,
    GradientSequence,
    SmallOptimizers,
    differ,
    unequal_entries,
)

_FIELD = "Training.optimizer"
_MOVES = (
    "When a section moves or its VM dies, a new optimizer gets the state that was saved, and nothing else"
)
_REMEDY = (
    "Give a schedule of learning rates as Training(schedule=...), a function of the step. Keep other state "
    "in `self.state[parameter]`, or as numbers in attributes and parameter groups of the optimizer. Whatever "
    "only watches may be in a hook of the step"
)
_CALLS = 1000  # of a hook, to see whether it ever changes anything


def check_kept_state(
    training: Training, tensors: Mapping[str, Tensor], sections: Sequence[Sequence[str]], report: Report
) -> None:
    """Raises `UserCodeError` when an optimizer keeps state that cannot be saved."""
    watching: set[object] = set()
    for section in sections:
        for sequence in SEQUENCES:
            with preserved_randomness():
                _Trial(SmallOptimizers(training, tensors, [section]), sequence, watching).run(section, report)
            if report.blames(_FIELD):
                return


class _Trial:
    """One optimizer runs and is saved; then it goes on, and so does a new one that got its state."""

    def __init__(self, old: SmallOptimizers, sequence: GradientSequence, watching: set[object]) -> None:
        """`watching`: hooks that earlier trials found to only watch; it adds to them."""
        self._old = old
        self._watching = watching
        self._sequence = _seeded(sequence)

    def run(self, section: Sequence[str], report: Report) -> None:
        born = reachable(self._old.first)
        deque(self._continue(self._old, 0), maxlen=0)
        saved = reachable(self._old.first)
        new = self._old.reloaded()
        apart: list[str] = []
        num_steps = 0
        for one, other in zip(
            self._continue(self._old, NUM_STEPS), self._continue(new, NUM_STEPS), strict=False
        ):
            apart = apart or differ(one, other, section)
            num_steps += 1
        unequal = unequal_entries(self._old, new) if num_steps == NUM_STEPS else []
        lost = _lost(born, saved, reachable(self._old.first), reachable(new.first))
        hooks = {value.hook for value in lost.values()}
        watching = {hook for hook in hooks if hook is not None and self._only_watches(new.first, *hook)}
        kept = [path for path, value in lost.items() if value.is_large or value.hook not in watching]
        if apart or kept:
            _blame(apart, kept, report)
        elif unequal:
            report.find(
                _FIELD,
                f"its state in {some(unequal)} has other bits in two optimizers that take the same steps, as "
                "if it held a time or a number of its own. Hosts of a section compare their state while they "
                "train, so these would be taken for hosts whose memory is wrong",
                "Keep in parameter groups and in `self.state` only what follows from the steps; what only "
                "watches may be an attribute of the optimizer",
            )

    def _only_watches(self, optimizer: Optimizer, registered: str, number: int) -> bool:
        hook = list(step_hooks(optimizer)[registered].values())[number]
        key = registered, number, getattr(hook, "__code__", type(hook))
        if key not in self._watching and _only_watches(optimizer, hook):
            self._watching.add(key)
        return key in self._watching

    def _continue(self, optimizer: SmallOptimizers, begin: int) -> Iterator[dict[str, Tensor]]:
        return optimizer.run(self._sequence, begin=begin)


def _seeded(sequence: GradientSequence) -> GradientSequence:
    """Both optimizers draw the same numbers in a step from the generators that all share."""

    def gradients(step: int) -> Gradient:
        seed_everything(seed64("probe step", step))
        return sequence(step)

    return gradients


def _lost(
    born: Mapping[str, Value], saved: Mapping[str, Value], old: Mapping[str, Value], new: Mapping[str, Value]
) -> dict[str, Value]:
    """The values that the old optimizer changed, and that the new one does not have.

    A cache is filled again by the new one's steps. Of what both share, such as a global, the new one in
    another process has nothing; it is lost if it still changes.
    """
    lost: dict[str, Value] = {}
    for path, value in old.items():
        before, now = saved.get(path), new.get(path)
        still_changes = before is None or before.print != value.print
        if now is not None and now.holder == value.holder:
            is_lost = still_changes
        else:
            changed = still_changes or path not in born or born[path].print != value.print
            is_lost = changed and (now is None or now.print != value.print)
        if is_lost:
            lost[path] = value
    return lost


def _only_watches(optimizer: Optimizer, hook: Any) -> bool:
    """Whether a hook, called often, never writes to the optimizer: not even the value that is there.

    It runs in an empty folder, as it may save a file at each n-th call.
    """
    writes: list[str] = []
    optimizer.param_groups[:] = [_Recording(group, writes) for group in optimizer.param_groups]
    before = _written(optimizer)
    with TemporaryDirectory() as folder, chdir(folder):
        for _ in range(_CALLS):
            try:
                call_user_code("a hook of the optimizer's step", hook, optimizer, (optimizer,), {})
            except UserCodeError:
                return False  # such as a schedule that is over
            if writes:
                return False
    after = _written(optimizer)
    return before.keys() == after.keys() and all(
        version == after[name][0] and torch.equal(value, after[name][1])
        for name, (version, value) in before.items()
    )


def _written(optimizer: Optimizer) -> dict[tuple[int, str], tuple[int, Tensor]]:
    """How often each tensor of the optimizer was written, and its value."""
    found: dict[tuple[int, str], tuple[int, Tensor]] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        held = {"": parameter, ".grad": parameter.grad, **state}
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        found |= {(number, n): (num_writes(t), t.detach().nan_to_num().clone()) for n, t in tensors.items()}
    return found


class _Recording(dict[str, Any]):
    """A parameter group that notes what is written to it."""

    def __init__(self, group: Mapping[str, Any], writes: list[str]) -> None:
        super().__init__(group)
        self._writes = writes

    def __setitem__(self, key: str, value: Any) -> None:
        self._writes.append(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._writes.append(key)
        super().__delitem__(key)

    def __ior__(self, other: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._writes.append(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._writes.append("popitem")
        return super().popitem()

    def clear(self) -> None:
        self._writes.append("clear")
        super().clear()

    def update(self, *given: Any, **named: Any) -> None:
        self._writes.append("update")
        super().update(*given, **named)


def _blame(apart: Sequence[str], lost: Sequence[str], report: Report) -> None:
    shown = "; ".join(lost[:4]) + (f"; and {len(lost) - 4} more" if len(lost) > 4 else "")
    said = f"its state in {shown} changes in training, and is not saved with a section" if lost else ""
    if apart:
        said += ", so that" if lost else "it keeps state that is not saved with a section, so that"
        said += f" {some(apart)} would be updated otherwise after a death"
    report.find(_FIELD, f"{said}. {_MOVES}", _REMEDY)
