"""What a user hands over is checked, and faults in user code come back with their traceback."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from makara.model.errors import UserCodeError
from makara.model.training import Training, load_entrypoint
from models import Tokens, UntiedMLP, last_token_loss, untied_mlp


def fields(**changes: object) -> dict[str, object]:
    training = untied_mlp()
    return {
        "model": UntiedMLP,
        "loss": last_token_loss,
        "optimizer": training.optimizer,
        "dataset": Tokens,
        **changes,
    }


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "dataset", "schedule", "clip_grad_norm"])
def test_a_field_of_the_wrong_type_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Training\.{name}: expected"):
        Training(**fields(**{name: "text"}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True])
def test_a_clip_norm_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(TypeError, match="clip_grad_norm"):
        Training(**fields(clip_grad_norm=value))  # pyright: ignore[reportArgumentType]


def test_an_entrypoint_is_loaded_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_ok.py").write_text("NAME = 'SGD'\n")
    (tmp_path / "entry_ok.py").write_text(
        "import torch, neighbour_of_ok\n"
        "from makara.worker import Training\n"
        "def build():\n"
        "    make = getattr(torch.optim, neighbour_of_ok.NAME)\n"
        "    return Training(model=lambda: torch.nn.Linear(1, 1), loss=lambda o, b: o.mean(),\n"
        "                    optimizer=lambda named: make(named, lr=0.1), dataset=list)\n"
    )
    assert isinstance(load_entrypoint(tmp_path, "entry_ok:build"), Training)


@pytest.mark.parametrize(
    ("entrypoint", "source", "message"),
    [
        ("no_colon", "", "expected module:function"),
        ("entry_a:build", "build = 3\n", "no function 'build'"),
        ("entry_b:build", "def build():\n    return 3\n", r"expected a makara\.worker\.Training, got int"),
        ("entry_c:build", "def build():\n    raise KeyError('lost')\n", "KeyError: 'lost'"),
        ("entry_d:build", "import not_there_at_all\n", "ModuleNotFoundError"),
        ("entry_e:build", "def build(:\n", "SyntaxError"),
    ],
)
def test_a_faulty_entrypoint_says_what_is_wrong(
    tmp_path: Path, entrypoint: str, source: str, message: str
) -> None:
    (tmp_path / f"{entrypoint.partition(':')[0]}.py").write_text(source)
    with pytest.raises(UserCodeError, match=message):
        load_entrypoint(tmp_path, entrypoint)


def test_what_user_code_raises_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "entry_f.py").write_text(
        "def build():\n    return deep()\ndef deep():\n    raise OSError('disk')\n"
    )
    with pytest.raises(UserCodeError) as caught:
        load_entrypoint(tmp_path, "entry_f:build")
    assert caught.value.traceback is not None
    assert "in deep" in caught.value.traceback


def test_the_messages_are_imported_without_torch() -> None:
    code = "import sys, makara.protocol.messages, makara.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WEIGHTS_FROM_IMPORT = """
import copy, random
import numpy as np
import torch
from makara.worker import Training
from torch import nn

layer, weight = nn.Linear(4, 4), torch.randn(4)
factor, shift = random.random(), np.random.rand(4)

class Model(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.copied, self.loaded = copy.deepcopy(layer), nn.Linear(4, 4)
        self.loaded.load_state_dict(layer.state_dict())
        self.cloned, self.kept = nn.Parameter(weight.clone()), nn.Parameter(weight)
        self.factor = nn.Parameter(torch.tensor(factor))
        self.shift = nn.Parameter(torch.tensor(shift).float())
        self.drawn = nn.Parameter(drawn * 2)

    def forward(self, x):
        x = self.loaded(self.copied(x)) * self.cloned + self.kept * self.factor
        return x + self.shift + self.drawn

def build():
    drawn = torch.randn(4)
    return Training(model=lambda: Model(drawn), loss=lambda output, batch: output.mean(),
                    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
                    dataset=lambda: [{"x": torch.ones(4)}] * 4)
"""
PRINT_WEIGHTS = """
import sys
from makara.model.tracing.trace import trace
from makara.model.training import load_entrypoint

traced = trace(load_entrypoint(sys.argv[1], "from_import:build"), 2, 5)
print({name: traced.initial(name).tolist() for name in traced.parameter_names}, traced.graph_hash)
"""


def test_weights_that_come_from_the_import_are_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "from_import.py").write_text(WEIGHTS_FROM_IMPORT)
    command = [sys.executable, "-c", PRINT_WEIGHTS, str(tmp_path)]
    first, second = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2))
    assert first.stdout == second.stdout


def test_loading_leaves_the_random_generators_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "from_import_here.py").write_text(WEIGHTS_FROM_IMPORT)
    before = torch.get_rng_state(), random.getstate()
    load_entrypoint(tmp_path, "from_import_here:build")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
