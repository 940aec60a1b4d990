"""What a check takes of the machine's memory, against what it said that it would take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import WIDTH, Layers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

LENGTH, HEADS = 768, 8

# Its child's peak is its own affair: Linux hands the peak of whoever forks on to the program that begins.
RUN = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


class Buffered(Layers):
    """Its memory is a buffer: as it was made, or moved by every forward."""

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.zeros(1 << 20, 12))
        self.moved = moved

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x + self.table[0, :WIDTH])
        if self.moved:
            with torch.no_grad():
                self.table.mul_(0.9)
        return output


class Constant(Layers):
    """The same in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(1 << 20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[0, :WIDTH])


class Attention(nn.Module):
    """The scores, which only the operator itself sees, are its memory."""

    def __init__(self, dropout: float, bias: bool) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(WIDTH, 3 * HEADS * 4), nn.Linear(HEADS * 4, WIDTH)
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH)) if bias else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(1) * torch.linspace(0, 1, LENGTH).unsqueeze(1)
        query, key, value = self.project(rows).unflatten(2, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, self.bias, self.dropout)
        return self.last(mixed.transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    """The gates of every step are its memory."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells, self.last = kind(WIDTH, 256, batch_first=True), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(1) * torch.linspace(0, 1, 32).unsqueeze(1)
        return self.last(self.cells(rows)[0].mean(1))


def checked(folder: Path, source: str, m: int = 1) -> tuple[dict[str, Any], int]:
    """(the report, the most bytes that the check's process held)."""
    code = f"import sys\nsys.path.extend({sys.path!r})\n"
    code += "from plain_models import training\nfrom test_check_memory import *\n\n\n"
    (folder / "train.py").write_text(f"{code}def build():\n    return training(lambda: {source})\n")
    settings = json.dumps({"microbatch_size": m})
    check = [sys.executable, "-m", "makara.worker.check", str(folder), "train:build", settings]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *check],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    answer = json.loads(done.stdout)
    assert answer["model"] is not None, answer["error"]
    return answer["model"], int(done.stderr.split()[-1]) * 1024


@pytest.fixture(scope="module")
def bare_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of the check of a model that is next to nothing: the interpreter's, and torch's."""
    return checked(tmp_path_factory.mktemp("bare"), "Layers()")[1]


@pytest.mark.parametrize(
    ("source", "m"),
    [
        ("Buffered()", 1),
        pytest.param("Buffered(moved=True)", 1, marks=pytest.mark.soak),
        ("Constant()", 1),
        ("Attention(0.1, False)", 2),
        pytest.param("Attention(0.0, True)", 2, marks=pytest.mark.soak),
        ("Recurrent(nn.LSTM)", 256),
        pytest.param("Recurrent(nn.GRU)", 256, marks=pytest.mark.soak),
    ],
)
def test_the_process_takes_no_more_than_was_said(
    tmp_path: Path, bare_bytes: int, source: str, m: int
) -> None:
    """Found: a buffer of 190 MiB was said to need nothing, and took 1,150 MiB."""
    report, peak_bytes = checked(tmp_path, source, m)
    taken_bytes = peak_bytes - bare_bytes
    print(f"{source}: took {taken_bytes / 2**20:.0f} MiB of {report['memory_bytes'] / 2**20:.0f} MiB said")
    assert report["not_compared"] is None
    assert 100 << 20 < taken_bytes <= report["memory_bytes"]
