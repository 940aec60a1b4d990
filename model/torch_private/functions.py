"""What lies below `torch.autograd.Function`, whose `apply` all calls of custom functions go through.

Replacing `Function.apply` itself would miss those that hold it under another name. Checked with torch 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.function import _SingleLevelFunction  # pyright: ignore[reportPrivateUsage]

BELOW_FUNCTION: Any = _SingleLevelFunction
"""The class below `Function`."""
TORCHS_OPERATORS = ("torch._library.autograd", "torch._higher_order_ops")
"""Modules of functions whose forward is all there is to them, or whose backward a graph keeps."""
