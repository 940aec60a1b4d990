"""The module inside what `torch.compile` returns (`torch._dynamo`), which has no public name for it.

Checked with torch 2.13.
"""

from __future__ import annotations

import sys
from typing import Any


def uncompiled(model: Any) -> Any:
    """`model` without the wrappers of `torch.compile`; anything else as it is."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # loaded by whoever compiles
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = getattr(model, "_orig_mod")  # noqa: B009
    return model
