"""Entrypoints with one fault each, and the check that `makara apply` runs on them, in a forked process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer_processes import CONTEXT

GOOD = """\
import torch
from makara.worker import Training


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x)


class Data:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 2)}


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch["y"])


def optimizer(named):
    return torch.optim.SGD(named, lr=0.1)


def build():
    return Training(model=Model, loss=loss, optimizer=optimizer, dataset=Data)
"""
_FORWARD = "        return self.second(x)"

# What is wrong: the text in GOOD, what stands there instead, and what the refusal must say.
FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a syntax error": ("def build():", "def build(:", ("importing 'train': SyntaxError", "line 31")),
    "the module exits": ("import torch\n", "raise SystemExit(3)\n", ("status 3",)),
    "the entrypoint raises": (
        "def build():\n",
        "def build():\n    raise RuntimeError('no data here')\n",
        ("entrypoint 'train:build': RuntimeError: no data here", 'train.py", line 32, in build'),
    ),
    "the entrypoint returns nothing": (
        "    return Training(",
        "    Training(",
        ("entrypoint 'train:build': expected a makara.worker.Training, got NoneType",),
    ),
    "a field of Training is missing": (
        ", dataset=Data",
        "",
        ("TypeError", "'dataset'", 'train.py", line 32'),
    ),
    "the model raises": (
        "        super().__init__()\n",
        "        super().__init__()\n        raise ValueError('no such size')\n",
        ("Training.model: ValueError: no such size", 'train.py", line 8, in __init__'),
    ),
    "the model is a number": (
        "model=Model",
        "model=lambda: 3",
        ("Training.model: expected a torch.nn.Module",),
    ),
    "the model branches on values": (
        _FORWARD,
        f"        if x.sum() > 0:\n            x = -x\n{_FORWARD}",
        ("cannot be traced", "train.py:12: if x.sum() > 0:", "torch.where"),
    ),
    "the model leaves torch": (
        _FORWARD,
        "        return self.second(torch.from_numpy(x.detach().numpy()))",
        ("cannot be traced", "train.py:12: return self.second(torch.from_numpy"),
    ),
    "the model's shapes do not fit": (_FORWARD, "        return x @ x", ("train.py:12: return x @ x",)),
    "the samples lack what the model takes": (
        '{"x": ',
        '{"z": ',
        ("Training.dataset: samples have the entries ['y', 'z']", "needs ['x']"),
    ),
    "the data cannot be opened": (
        "    def __len__",
        "    def __init__(self):\n        open('/nowhere/data.bin')\n\n    def __len__",
        ("Training.dataset: FileNotFoundError", "/nowhere/data.bin", 'train.py", line 17'),
    ),
    "the data is empty": ("return 10", "return 0", ("dataset: len() is 0",)),
    "a sample raises": (
        "        return {",
        "        raise OSError('no disk')\n        return {",
        ("dataset[0]: OSError: no disk", 'train.py", line 20, in __getitem__'),
    ),
    "a sample is no dict": ("        return {", "        return index, {", ("dataset[0]: expected a dict",)),
    "a sample is a text": (
        "torch.tensor(index % 2)",
        "'cat'",
        ("dataset[0]['y']: expected a tensor", "got a str"),
    ),
    "the samples differ in shape": (
        "torch.full((4,)",
        "torch.full((4 if index == 0 else 5,)",
        ("['x']: float32[5] differs from sample 0's float32[4]",),
    ),
    "the loss raises": (
        'batch["y"]',
        'batch["label"]',
        ("Training.loss: KeyError: 'label'", 'train.py", line 24, in loss'),
    ),
    "the loss is no scalar": (
        'batch["y"])',
        'batch["y"], reduction="none")',
        ("Training.loss: expected a scalar tensor",),
    ),
    "the loss is a sum": (
        'batch["y"])',
        'batch["y"], reduction="sum")',
        ("Training.loss: it returns a mean", "2 times", "Return a mean over the samples"),
    ),
    "the loss trains nothing": (
        'batch["y"])',
        'batch["y"]).detach()',
        ("Training.loss", "no gradient flows"),
    ),
    "the loss has parameters of its own": (
        "def loss(output, batch):\n",
        "OWN = torch.nn.Parameter(torch.ones(2))\n\ndef loss(output, batch):\n    output = output * OWN\n",
        ("Training.loss", "not the model's (of shape [2])", "Make them parameters of the model"),
    ),
    "there are two optimizers": (
        "return torch.optim.SGD(named, lr=0.1)",
        "return torch.optim.SGD(named, lr=0.1), torch.optim.SGD(named, lr=0.2)",
        ("Training.optimizer: expected one torch Optimizer, got tuple of 2", "parameter groups", "in turns"),
    ),
    "the optimizer raises": ("lr=0.1", "lr=-1", ("Training.optimizer: ValueError", 'train.py", line 28')),
    "the optimizer is none": (
        "return torch.optim",
        "torch.optim",
        ("Training.optimizer: expected one torch Optimizer, got NoneType",),
    ),
    "the optimizer has other parameters": (
        "SGD(named",
        "SGD(Model().parameters()",
        ("Training.optimizer: the optimizer holds a parameter that the function was not given",),
    ),
    "the optimizer cannot step": (
        "SGD(named, lr=0.1)",
        "LBFGS([parameter for _, parameter in named])",
        ("Training.optimizer: the step of LBFGS calls a closure",),
    ),
    "the schedule raises": (
        "dataset=Data",
        "dataset=Data, schedule=lambda step: 1 / step",
        ("Training.schedule(0): ZeroDivisionError", 'train.py", line 32'),
    ),
    "the schedule is no number": (
        "dataset=Data",
        "dataset=Data, schedule=lambda step: 'high'",
        ("Training.schedule(0): ValueError", "high"),
    ),
}
SETTINGS = {"global_batch_size": 4, "seed": 0, "microbatch_size": 2, "num_sections": None}


def faulty(what: str) -> str:
    """The code with that fault."""
    old, new, _ = FAULTS[what]
    assert GOOD.count(old) == 1, what
    return GOOD.replace(old, new)


def check(folder: Path, source: str, entrypoint: str = "train:build", **settings: Any) -> str:
    """What `python -m makara.worker.check` tells a user of a folder with this `train.py`; "ok" if it passes.

    The process is forked from one that has torch: the same code without the seconds that importing takes.
    """
    (folder / "train.py").write_text(source)
    output = folder / "output"
    process = CONTEXT.Process(
        target=_main, args=(str(output), str(folder), entrypoint, json.dumps({**SETTINGS, **settings}))
    )
    process.start()
    process.join()
    lines = output.read_text().splitlines()
    if not lines:
        return f"ended its process with status {process.exitcode}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return "ok" if answer["ok"] else f"{answer['error']}\n{answer['traceback']}"


def _main(output: str, *arguments: str) -> None:
    from makara.worker.check.check import main

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["check", *arguments]
    main()
    sys.stdout.flush()
