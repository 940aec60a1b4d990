"""The paper's 2.5-billion-parameter GPT-2 traced and cut: seconds, peak memory, and where the cuts are.

Runs in a process of its own, so that the peak is that of this work and of the imports alone.
"""

from __future__ import annotations

import re
import resource
import time
from itertools import pairwise

import torch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker import Training
from torch import Tensor

from .emulated.fleet import in_fresh_process
from .report import Row

TITLE = "GPT-2 with 54 layers of hidden size 1920, sequence length 1024, m = 1"
LAYERS, HIDDEN, HEADS, LENGTH = 54, 1920, 20, 1024
SECONDS, GIGABYTES = 30.0, 2.0  # what it may take


def rows() -> list[Row]:
    return [in_fresh_process(_row, environment={"HF_HUB_OFFLINE": "1"})]


def _row() -> Row:
    torch.set_num_threads(1)
    training = gpt2()
    imported_gb = peak_gb()
    began = time.perf_counter()
    traced = trace(training, 1)
    middle = time.perf_counter()
    chain = split(traced, choose_cuts(traced))
    ended = time.perf_counter()
    return {
        "parameters": sum(traced.tensors[name].numel() for name in traced.parameter_names),
        "trace s": middle - began,
        "cut s": ended - middle,
        "peak GB": peak_gb(),
        "of it imports": imported_gb,
        "K": chain.num_sections,
        "cuts are the blocks'": cuts_are_between_blocks(chain),
        "kB across a cut": max(cut_bytes(chain)) / 1000,
        "within bounds": ended - began < SECONDS and peak_gb() < GIGABYTES,
    }


def gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=LENGTH)
    return Training(
        model=lambda: GPT2LMHeadModel(config),
        loss=lambda output, batch: output.loss,
        optimizer=torch.optim.AdamW,
        dataset=Tokens,
    )


class Tokens:
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) + index) % 50257
        return {"input_ids": tokens, "labels": tokens}


def cuts_are_between_blocks(chain: Sections) -> bool:
    """Whether every section has exactly one block's parameters, the blocks in order."""
    held: list[set[int]] = [
        {
            int(found[1])
            for name in section.parameters
            if (found := re.match(r"transformer\.h\.(\d+)\.", name))
        }
        for section in chain.sections
    ]
    numbers = [next(iter(blocks)) for blocks in held if len(blocks) == 1]
    return len(numbers) == chain.num_sections == LAYERS and all(b == a + 1 for a, b in pairwise(numbers))


def cut_bytes(chain: Sections) -> list[int]:
    return [sum(value.size_bytes for value in values) for values in chain.crossing]


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
