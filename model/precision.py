"""Precision of the computation: weights, sums of gradients and optimizers are fp32, autocast computes.

The user's forward and loss run as under `torch.autocast(device.type, dtype)`. A section is run under an
autocast of its own, so casts of weights are cached within a section and never between sections, micro-batches
or steps. Values cross a cut with the type that autocast gives them (see `tracing`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """The context in which forward and loss are computed; with fp32 it changes nothing."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, _DTYPES[precision])
