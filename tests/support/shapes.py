"""One model trained at many shapes P×D at once, by real processes over real groups; what each came to.

`Forge` is a process that has imported all that is heavy and holds no thread. For each question it forks a
process that traces the model once, and that one forks a process for each rank of each shape, and one each
for the reference and for the user's own module: nothing is imported or traced twice. See `shape_ranks` for
what a rank does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from makara.checkpoint.tensors import unpack
from torch import Tensor

REFERENCE, EAGER = "reference", "eager"
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Shape:
    """P×D, and how the plan is played. `uneven`: every other pipeline has a stage less. `told`: the plan says
    which sections are frozen."""

    stages: int
    replicas: int
    recompute: bool = False
    halves: bool = False
    schedule: str = "varuna"
    uneven: bool = False
    window: int | None = None
    told: bool = True

    def __str__(self) -> str:
        said = [self.schedule] * (self.schedule != "varuna") + ["recompute"] * self.recompute
        said += ["halves"] * self.halves
        said += ["uneven"] * self.uneven + [f"window{self.window}"] * (self.window is not None)
        said += ["untold"] * (not self.told)
        return "-".join([f"{self.stages}x{self.replicas}", *said])

    @property
    def depths(self) -> list[int]:
        """Stages of each pipeline."""
        return [self.stages - (self.uneven and replica % 2) for replica in range(self.replicas)]

    @property
    def workers(self) -> int:
        return sum(self.depths)


@dataclass(frozen=True, slots=True)
class Question:
    """A model, and what to do with it. `entry`: module:function of a `Training`; `given`: its arguments."""

    entry: str
    given: dict[str, Any]
    numerics: Literal["exact", "fast"]
    shapes: tuple[Shape, ...]
    yardsticks: tuple[str, ...]  # of REFERENCE, EAGER
    steps: int = 3
    microbatch_size: int = 2
    num_micro_batches: int = 5
    num_sections: int | None = None  # None: as many as the graph gives
    seed: int = 7
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Question:
        values = json.loads(text)
        values["shapes"] = tuple(Shape(**shape) for shape in values["shapes"])
        return cls(**{**values, "yardsticks": tuple(values["yardsticks"])})


@dataclass(frozen=True, slots=True)
class Ending:
    """What a run came to: `state` by name as `SectionRuntime.state` gives it, all sections together."""

    losses: list[float]
    state: dict[str, Tensor]


class Forge:
    """The process that the others are forked from. `close` ends all of them."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "forge.log"
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_FOLDER / "shape_runner.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                text=True,
            )

    def ask(self, question: Question, folder: Path) -> dict[str, Ending]:
        """Each yardstick's and each shape's ending, by name. Raises `AssertionError` with what went wrong."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "question.json").write_text(question.to_json())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "done":
            faults = "\n".join(path.read_text() for path in sorted(folder.glob("*/*.fault")))
            raise AssertionError(f"{question.entry}: {faults or self._log.read_text()[-4000:]}")
        names = [*question.yardsticks, *map(str, question.shapes)]
        return {name: _ending(folder / name) for name in names}

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _ending(folder: Path) -> Ending:
    """All ranks' results as one; ranks that hold the same section must agree to the bit."""
    losses: list[list[float]] = []
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors, metadata = unpack(path.read_bytes())
        losses.append(json.loads(metadata["losses"]))
        differing = [n for n, t in tensors.items() if n in state and not same_bits(state[n], t)]
        assert not differing, f"{path}: differs from another host of its sections in {differing}"
        state |= tensors
    assert losses, f"{folder}: no rank left a result"
    assert all(own == losses[0] for own in losses), f"{folder}: ranks tell different losses: {losses}"
    return Ending(losses[0], state)


def same_bits(a: Tensor, b: Tensor) -> bool:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def differing(found: Ending, wanted: Ending) -> Sequence[str]:
    """Names of what differs in any bit, or is in one only."""
    names = sorted(found.state.keys() | wanted.state.keys())
    both = found.state.keys() & wanted.state.keys()
    return [n for n in names if n not in both or not same_bits(found.state[n], wanted.state[n])]
