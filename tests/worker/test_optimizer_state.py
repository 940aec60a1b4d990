"""What an optimizer keeps where no checkpoint holds it is found by name, before a death loses it; what only
watches training passes."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from coupled_models import sound
from makara.model.errors import UserCodeError
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker.check.comparison import watch_for
from makara.worker.check.findings import Report
from makara.worker.check.optimizers import check_optimizer
from torch import optim
from torch.optim import lr_scheduler

FOLDER = Path(__file__).parents[1]
Make = Callable[[Any], optim.Optimizer]


@pytest.fixture(scope="module")
def chain() -> Sections:
    traced = trace(sound(), 1)
    return split(traced, choose_cuts(traced))


def found(make: Make, chain: Sections) -> list[str]:
    training, report = sound(optimizer=make), Report()
    check_optimizer(training, chain, watch_for(training, FOLDER), report)
    return [str(finding) for finding in report.findings]


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD(named, lr=0.05, momentum=0.9)


def hooked(hook_of: Callable[[optim.Optimizer], Callable[..., Any]], *, pre: bool = False) -> Make:
    """SGD with the hook that is made for it."""

    def make(named: Any) -> optim.Optimizer:
        optimizer = sgd(named)
        (optimizer.register_step_pre_hook if pre else optimizer.register_step_post_hook)(hook_of(optimizer))
        return optimizer

    return make


def scheduled(make_scheduler: Callable[[optim.Optimizer], Any], *, pre: bool = False) -> Make:
    def hook_of(optimizer: optim.Optimizer) -> Callable[..., Any]:
        scheduler = make_scheduler(optimizer)
        return lambda *_: scheduler.step()

    return hooked(hook_of, pre=pre)


def late_counter(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """Its first change of a rate comes after the steps that a check could take."""
    num_calls = 0

    def hook(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 500:
            optimizer.param_groups[0]["lr"] = 0.001

    return hook


class Warmup:
    """A schedule of the user's own, constant for long; with slots, and the optimizer's groups."""

    __slots__ = ("groups", "num_steps")

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.groups, self.num_steps = optimizer.param_groups, 0

    def __call__(self, *_: Any) -> None:
        self.num_steps += 1
        for group in self.groups:
            group["lr"] = 0.05 if self.num_steps < 10_000 else 0.01


def from_an_iterator(optimizer: optim.Optimizer) -> Callable[..., Any]:
    rates = iter([0.05] * 5000)

    def hook(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] = next(rates)

    return hook


def from_a_generator(optimizer: optim.Optimizer) -> Callable[..., Any]:
    def rates() -> Any:
        for step in itertools.count():
            yield 0.05 if step < 5000 else 0.01

    running = rates()

    def hook(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] = next(running)

    return hook


def moving_average(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """Changes nothing of the optimizer, and is lost all the same."""
    averages = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def hook(*_: Any) -> None:
        current = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_lerp_(averages, current, 0.1)

    return hook


class Windowed(optim.SGD):
    """Keeps recent norms in a container, and steps by them when it has seen many."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.norms: deque[float] = deque(maxlen=1000)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.norms.append(float(self.param_groups[0]["params"][0].grad.norm()))
        if len(self.norms) == 1000:
            self.param_groups[0]["lr"] = 1 / sum(self.norms)
        super().step()


class Inside(optim.SGD):
    """Steps a scheduler in its own step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.scheduler = lr_scheduler.StepLR(self, 30_000)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        self.scheduler.step()


class Noisy(optim.SGD):
    """Adds noise from a generator of its own, seeded alike in every process."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.noise = torch.Generator().manual_seed(3)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data += 1e-3 * torch.randn(parameter.shape, generator=self.noise)


class Shared(optim.SGD):
    """Counts in its class."""

    counts: ClassVar[dict[str, int]] = {"steps": 0}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        self.counts["steps"] += 1
        if self.counts["steps"] == 1_000_000:
            self.param_groups[0]["lr"] = 0.001


STEPS_OF_ALL = 0


def global_counter(optimizer: optim.Optimizer) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        global STEPS_OF_ALL
        STEPS_OF_ALL += 1
        optimizer.param_groups[0]["lr"] = 0.05 if STEPS_OF_ALL < 1_000_000 else 0.01

    return hook


POST = "register_step_post_hook: "
LOST: dict[str, tuple[Make, str]] = {
    "OneCycleLR": (
        scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=80)),
        f"{POST}<lambda> closure 'scheduler'.last_epoch",
    ),
    "OneCycleLR that is over soon": (
        scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=30)),
        f"{POST}<lambda> closure 'scheduler'.last_epoch",
    ),
    "StepLR that moves no rate yet": (
        scheduled(lambda o: lr_scheduler.StepLR(o, 30_000)),
        f"{POST}<lambda> closure 'scheduler'.last_epoch",
    ),
    "LambdaLR before the step": (
        scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0), pre=True),
        "register_step_pre_hook: <lambda> closure 'scheduler'.last_epoch",
    ),
    "a counter that acts late": (hooked(late_counter), f"{POST}hook closure 'num_calls'"),
    "an object with slots": (hooked(Warmup), f"{POST}Warmup.num_steps"),
    "an iterator": (hooked(from_an_iterator), f"{POST}hook closure 'rates' (an iterator)"),
    "a generator": (hooked(from_a_generator), f"{POST}hook closure 'running'"),
    "a global": (hooked(global_counter), f"{POST}hook global 'STEPS_OF_ALL'"),
    "a moving average of weights": (hooked(moving_average), f"{POST}hook closure 'averages'[0]"),
    "a container": (Windowed, "self.norms"),
    "a scheduler in step": (Inside, "self.scheduler.last_epoch"),
    "a generator of random numbers": (Noisy, "self.noise"),
    "a class attribute": (Shared, "Shared.counts['steps']"),
}


@pytest.mark.parametrize("what", LOST)
def test_state_that_a_death_would_lose_is_named(chain: Sections, what: str) -> None:
    make, path = LOST[what]
    (text,) = found(make, chain)
    assert text.startswith("Training.optimizer: ")
    assert path in text
    assert "Training(schedule=...)" in text
    assert "may be in a hook of the step" in text


# ---- what passes -------------------------------------------------------------------------------------------


def logger(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """Writes down rates, counts and times, in all the ways that people do."""
    log: dict[str, Any] = defaultdict(list)
    num_calls, times = [0], deque[float](maxlen=10)

    def hook(given: optim.Optimizer, *_: Any) -> None:
        num_calls[0] += 1
        log["rates"].append(optimizer.param_groups[0]["lr"])
        log["lr"] = given.param_groups[0]["lr"]
        log["norm"] = given.param_groups[0]["params"][0].detach().norm()
        times.append(time.perf_counter())
        hook.last = num_calls[0]  # pyright: ignore[reportFunctionMemberAccess]

    return hook


def profiled(optimizer: optim.Optimizer) -> Callable[..., Any]:
    counts = itertools.count()

    def hook(*_: Any) -> None:
        with torch.profiler.record_function(f"step {next(counts)}"):
            pass

    return hook


class Caching(optim.SGD):
    """Remembers what it can compute again: a table that goes round, and buffers made at first use."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.table: list[tuple[int, float]] = [(0, 0.0)] * 10
        self.sizes: dict[int, int] = {}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                self.sizes.setdefault(number, parameter.numel())
                self.table[count % 10] = (count, 0.05 / count)
        super().step()


class Numbered(optim.SGD):
    """Keeps numbers and a tensor in itself and in its groups, where they are saved."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.num_steps, self.scale = 0, torch.ones(())

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.num_steps += 1
        self.scale = self.scale * 0.99
        for group in self.param_groups:
            group["lr"] = float(self.scale) * 0.05 / self.num_steps
        super().step()


def settled(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """Writes to the optimizer, and keeps constants alone."""
    options = {"lowest": 0.01, "names": ["a"], "table": np.ones(3), "random": random.Random(3)}

    def hook(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"] * 0.9, options["lowest"])

    return hook


PASSING: dict[str, Make] = {
    "a logger": hooked(logger),
    "a logger before the step": hooked(logger, pre=True),
    "a profiler": hooked(profiled),
    "a hook without state": hooked(settled),
    "caches": Caching,
    "numbers of its own": Numbered,
    "a scheduler that is never stepped": hooked(
        lambda o: (lambda scheduler: lambda *_: scheduler.get_last_lr())(lr_scheduler.StepLR(o, 3))
    ),
}


@pytest.mark.parametrize("what", PASSING)
def test_what_only_watches_or_can_be_computed_again_passes(chain: Sections, what: str) -> None:
    assert found(PASSING[what], chain) == []


def writes(write: Callable[[dict[str, Any]], object]) -> Make:
    """A hook that keeps state, and writes to the group by a method of dicts."""

    def hook_of(optimizer: optim.Optimizer) -> Callable[..., Any]:
        calls: list[int] = []

        def hook(*_: Any) -> None:
            calls.append(1)
            write(optimizer.param_groups[0])

        return hook

    return hooked(hook_of)


@pytest.mark.parametrize(
    "write",
    [
        lambda group: group.update(group.__ior__({"lr": 0.05})),
        lambda group: group.__ior__({"lr": 0.05}),
        lambda group: (group.pop("mine", None), group.setdefault("mine", 1)),
        lambda group: group.__setitem__("lr", group.pop("lr")),
    ],
)
def test_a_hook_that_writes_to_a_group_in_any_way_does_more_than_watch(
    chain: Sections, write: Callable[[dict[str, Any]], object]
) -> None:
    (text,) = found(writes(write), chain)
    assert "closure 'calls'" in text


def test_a_hook_that_watches_is_called_a_thousand_times_once(chain: Sections) -> None:
    """Found: it was called so often for each section and life, and may save a file at each n-th call."""
    num_calls = 0

    def counting(optimizer: optim.Optimizer) -> Callable[..., Any]:
        seen: list[int] = []

        def hook(*_: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            seen.append(num_calls)

        return hook

    assert found(hooked(counting), chain) == []
    assert 1000 <= num_calls < 2000


def test_files_that_a_hook_saves_in_its_trial_stay_out_of_the_users_folder(
    chain: Sections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def saving(_: optim.Optimizer) -> Callable[..., Any]:
        calls: list[int] = []

        def hook(*_: Any) -> None:
            calls.append(1)
            if len(calls) % 100 == 0:
                Path("log.txt").write_text("saved")

        return hook

    assert found(hooked(saving), chain) == []
    assert list(tmp_path.iterdir()) == []


TORCHS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "ASGD",
    "RMSprop",
    "Rprop",
    "Adafactor",
]


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers_pass(chain: Sections, name: str) -> None:
    assert found(lambda named: getattr(optim, name)(named), chain) == []


@pytest.mark.parametrize("option", ["foreach", "fused", "amsgrad"])
def test_torchs_faster_paths_pass(chain: Sections, option: str) -> None:
    assert found(lambda named: optim.AdamW(named, **{option: True}), chain) == []


def test_an_optimizer_that_calls_a_closure_is_refused_with_what_to_use(chain: Sections) -> None:
    with pytest.raises(UserCodeError, match=r"the step of LBFGS calls a closure.*such as AdamW"):
        found(lambda named: optim.LBFGS([p for _, p in named]), chain)


def test_the_check_leaves_random_generators_as_they_were(chain: Sections) -> None:
    before = torch.get_rng_state(), random.getstate()
    assert found(sgd, chain) == []
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
