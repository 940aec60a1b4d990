"""A model whose operations do harm when a test orders it, and otherwise change no bit and only take time.

`HARM_FOLDER` names the folder in which orders come: the first trainer that finds `<kind>.order` there takes
it, writes when it did so into `<kind>.taken`, and does the harm. Without that variable nothing is looked for
and nothing waits, so the reference runs the same model fast.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch
from makara.worker import Training
from models import TiedGPT, Tokens, tied_gpt
from torch import Tensor

REST_S = 0.02  # of each of eight operations in a micro-batch: steps long enough to be hit
LOCKED_S = 60
STEPS_LOG = "steps.log"  # a line for each step that a trainer applied: when, which, and who


def _folder() -> Path | None:
    name = os.environ.get("HARM_FOLDER")
    return Path(name) if name else None


@torch.library.custom_op("makara_tests::harm", mutates_args=())
def harm(x: Tensor) -> Tensor:
    """A copy of `x`, unless some harm was ordered; its gradient takes as long, and does no harm."""
    folder = _folder()
    if folder is not None:
        time.sleep(REST_S)
        for kind, do in KINDS.items():
            if _take(folder, kind):
                do()
    return x.clone()


@harm.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _rest_too(_ctx, gradient: Tensor) -> Tensor:
    if _folder() is not None:
        time.sleep(REST_S)
    return gradient


harm.register_autograd(_rest_too)


def _take(folder: Path, kind: str) -> bool:
    """Whether this process, and no other, got the order."""
    order = folder / f"{kind}.order"
    if not order.exists() or not _trains():
        return False
    mine = folder / f"{kind}.{os.getpid()}"
    try:
        order.rename(mine)
    except FileNotFoundError:
        return False  # another was faster
    mine.write_text(json.dumps({"at": time.time(), "worker": _argument("--worker")}))
    mine.rename(folder / f"{kind}.taken")
    return True


def _trains() -> bool:
    """Not while the model is measured, in a process that trains nothing."""
    return "--worker" in sys.argv


def _argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def _raise() -> NoReturn:
    raise ArithmeticError("harm was ordered")


def _fail_inside() -> None:
    """The trainer's own code fails: the thread that talks to the agent gets an error where it stands."""
    (control,) = (thread for thread in threading.enumerate() if thread.name == "control")
    number, error = ctypes.c_ulong(control.ident or 0), ctypes.py_object(RuntimeError)
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
    assert found == 1, "one thread gets it"


def _abort() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _hold_the_lock() -> None:
    """`PyDLL` keeps the interpreter lock during the call, as an extension without care does."""
    ctypes.PyDLL(None).sleep(LOCKED_S)


def _hang() -> None:
    """Other threads run, and beats go on."""
    threading.Event().wait()


KINDS = {
    "operation": _raise,
    "internal": _fail_inside,
    "abort": _abort,
    "lock": _hold_the_lock,
    "hang": _hang,
}


class HarmedTokens(Tokens):
    """Data that this process cannot read any more, once it was ordered: what is loaded ahead is tried again
    before it is missed."""

    _lost = False

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        folder = _folder()
        if folder is not None and (self._lost or _take(folder, "data")):
            self._lost = True
            _raise()
        return super().__getitem__(index)


class HarmedGPT(TiedGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(self.positions)
        for block in self.blocks:
            x = harm(block(x))
        return self.head(self.norm(x))


_applied = 0


def rate(step: int) -> float:
    """The learning rate's factor, as in `models.tied_gpt`. It is asked for when a step is applied, by every
    section: the first time is noted."""
    global _applied
    folder = _folder()
    if folder is not None and step + 1 != _applied and _trains():
        _applied = step + 1
        line = json.dumps({"at": time.time(), "step": step + 1, "worker": _argument("--worker")})
        with (folder / STEPS_LOG).open("a") as file:
            file.write(line + "\n")
    return min(1.0, (step + 1) / 4)


def build() -> Training:
    return dataclasses.replace(tied_gpt(), model=HarmedGPT, dataset=HarmedTokens, schedule=rate)
