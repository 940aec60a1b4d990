"""Facts about workers: what fails, what all of them must meet, and who is slow."""

from __future__ import annotations

from typing import Any, Literal

from ....protocol.messages import Recipe
from .base import BaseFact


class WorkerFailed(BaseFact):
    """A trainer died while its VM lives on; its next incarnation is another worker as far as plans go."""

    fact: Literal["worker_failed"] = "worker_failed"
    worker: str
    incarnation: int
    kind: str
    message: str
    traceback: str | None = None
    step: int = 0  # newest step that was committed, as far as was reported
    own_steps: int | None = (
        0  # committed by this incarnation in its last generation; None: by an older version
    )
    counted: bool = True  # toward failing the job


class RecipeFixed(BaseFact):
    fact: Literal["recipe_fixed"] = "recipe_fixed"
    recipe: Recipe
    calibration: dict[str, Any]
    measurements: dict[str, Any] | None = None  # all that the calibration is of
    stored: bool = False  # an earlier job had left them in the store
    note: str = ""


class BitsFixed(BaseFact):
    """`numerics: exact`: the bits that every worker's kernels must give, as `workers` showed them.

    `note`: in what they differ from those of the job that this one starts from.
    """

    fact: Literal["bits_fixed"] = "bits_fixed"
    bits_hash: str
    kernels_hash: str | None = None
    note: str = ""
    workers: tuple[str, ...]


class Recalibrated(BaseFact):
    """The workers' own timings differ from the calibration for good: its times are multiplied, by section."""

    fact: Literal["recalibrated"] = "recalibrated"
    scales: tuple[float, ...]


class WorkerPaced(BaseFact):
    """A worker is slower than its peers for good, so many times; 1.0: it is not, or is to be tried again."""

    fact: Literal["worker_paced"] = "worker_paced"
    worker: str
    incarnation: int
    slowdown: float
