"""What a user hands over is checked, and faults in user code come back with their traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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
