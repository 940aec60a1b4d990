"""The errors of the trainer's side.

WorkerError
├── UserCodeError          the job's own code or data raised; carries its traceback
│   └── NonFiniteGradient  a gradient is infinite or not a number
├── UntraceableModel       the model cannot be one static graph; names the call and what to change
│   └── TooFewSamples      batch norm needs more samples in a micro-batch
└── RecipeMismatch         this process cannot meet the recipe that the job fixed at its first plan
"""

from __future__ import annotations


class WorkerError(Exception):
    """The root of the worker's errors."""


class UserCodeError(WorkerError):
    """The job's own code or data raised. `traceback`: the lines of the user's code that led to it,
    ready to print."""

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.traceback = traceback


class NonFiniteGradient(UserCodeError):
    """A gradient is infinite or not a number; repeating the step would give the same."""


class UntraceableModel(WorkerError):
    """The model cannot be one static graph. `call`: the user's source line, `traceback`: the lines that led
    to it, if known."""

    def __init__(self, message: str, call: str | None = None, traceback: str | None = None) -> None:
        super().__init__(message if call is None else f"{message}\n  at {call}")
        self.call = call
        self.traceback = traceback


class TooFewSamples(UntraceableModel):
    """Batch norm has one value per channel in a micro-batch of one sample, and cannot be trained on it."""


class RecipeMismatch(WorkerError):
    """This process cannot meet the job's recipe; the message names the field and both values."""
