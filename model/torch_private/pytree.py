"""Nested containers of tensors, taken apart and put together as torch.export does it (`torch.utils._pytree`).

An exported program says with a `TreeSpec` how its outputs nest, and there is no public name for it. Checked
with torch 2.13.
"""

from __future__ import annotations

from torch.utils._pytree import (
    KeyPath,
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "KeyPath",
    "TreeSpec",
    "keystr",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
