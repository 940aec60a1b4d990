"""A byte-level GPT on the source code of Python's standard library: plain PyTorch, as for one GPU."""

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 192
HEADS = 6
LAYERS = 6
DROPOUT = 0.1
CORPUS_BYTES = 8 << 20
WARMUP_STEPS = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))))


class GPT(nn.Module):
    """2.7 million parameters; the output layer shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(DROPOUT)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # as GPT-2: smaller where a block writes into the residual stream
                writes = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if writes else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def python_files(folder: Path) -> Iterator[Path]:
    """The .py files below `folder` in one order everywhere; no tests, nothing that was installed later."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in (
            "site-packages",
            "dist-packages",
            "test",
            "tests",
            "__pycache__",
        ):
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


class StandardLibrary:
    """Windows of CONTEXT bytes of the source code that every machine with this Python has."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        text = bytearray()
        for path in python_files(root):
            text += path.read_bytes()
            if len(text) >= CORPUS_BYTES:
                break
        self.text = torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def build() -> Training:
    return Training(
        model=GPT,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3, weight_decay=0.01),
        dataset=StandardLibrary,
        schedule=lambda step: min(1.0, (step + 1) / WARMUP_STEPS),
        clip_grad_norm=1.0,
    )
