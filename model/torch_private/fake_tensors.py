"""Tensors that have a shape and a type but no memory (`torch._subclasses.fake_tensor`).

A model is built of them, and torch.export gives them as the values of a graph; torch has no public name for
them. Checked with torch 2.13.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"]
