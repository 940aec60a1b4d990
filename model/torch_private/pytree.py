"""Nested containers of tensors, taken apart and put together as torch.export does it (`torch.utils._pytree`).

An exported program says with a `TreeSpec` how its outputs nest, and there is no public name for it. Checked
with torch 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, MappingKey, SequenceKey
from torch.utils._pytree import KeyPath as KeyPath
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


def add_keys(tree: Any) -> None:
    """Name the parts of each container in `tree` whose library registered it without names, which
    `tree_flatten_with_path` and torch.export want (diffusers' outputs)."""
    kind: Any = type(tree)
    known = SUPPORTED_NODES.get(kind)
    if known is None:  # a leaf, or a named tuple of the user's
        for part in tree if isinstance(tree, tuple) else ():
            add_keys(part)
        return
    flatten = known.flatten_fn

    def with_keys(container: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = flatten(container)
        named = isinstance(context, list | tuple) and len(context) == len(parts)
        keys = [MappingKey(k) for k in context] if named else [SequenceKey(i) for i in range(len(parts))]
        return list(zip(keys, parts, strict=True)), context

    if known.flatten_with_keys_fn is None:
        SUPPORTED_NODES[kind] = known._replace(flatten_with_keys_fn=with_keys)
    for part in flatten(tree)[0]:
        add_keys(part)
