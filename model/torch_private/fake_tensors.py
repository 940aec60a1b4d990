"""Tensors that have a shape and a type but no memory (`torch._subclasses.fake_tensor`).

A model is built of them, and torch.export gives them as the values of a graph; torch has no public name for
them. Checked with torch 2.13.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def without_values() -> FakeTensorMode:
    """Makes fake tensors, and takes real ones as such. Shapes may depend on values; to read one raises."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_scalar_outputs=False))
