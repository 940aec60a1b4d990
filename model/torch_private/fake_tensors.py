"""Tensors that have a shape and a type but no memory (`torch._subclasses.fake_tensor`).

A model is built of them, and torch.export gives them as the values of a graph; torch has no public name for
them. Checked with torch 2.13.
"""

from __future__ import annotations

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def in_active_mode(tensor: FakeTensor) -> FakeTensor:
    """The tensor as the mode that is entered knows it, whose views share its memory."""
    mode = detect_fake_mode()
    return (
        tensor if mode is None or mode is tensor.fake_mode else mode.from_tensor(tensor, static_shapes=True)
    )


def without_values() -> FakeTensorMode:
    """Makes fake tensors, and takes real ones as such. Shapes may depend on values; to read one raises."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_scalar_outputs=False))
