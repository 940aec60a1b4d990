"""Nested containers of tensors, taken apart and put together as torch.export does it (`torch.utils._pytree`).

An exported program says with a `TreeSpec` how its outputs nest, and there is no public name for it. Checked
with torch 2.13.
"""

from torch.utils._pytree import KeyPath as KeyPath
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
