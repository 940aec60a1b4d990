"""Mixed precision: weights, gradient sums and optimizers are fp32; forward and loss run under autocast.

Each section runs under its own `torch.autocast(device.type, dtype)`, so casts of weights are cached within a
section and never between sections, micro-batches or steps. Values cross a cut with the type that autocast
gives them (see `tracing`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def autocast(device_type: str, precision: Precision) -> AbstractContextManager[object]:
    """The autocast context for forward and loss; a null context for fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, _DTYPES[precision])
