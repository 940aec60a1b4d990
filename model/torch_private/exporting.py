"""Where torch.export is changed while a model is traced: (owner, attribute), as `guards.replaced` takes them.

Left alone, it loses regions and lines and says nothing of attributes (see `tracing.exporting`); it has no
public settings for any of this. Checked with torch 2.13.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.distributions import Distribution
from torch.export import _trace  # pyright: ignore[reportPrivateUsage]
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import TracerBase

Place = tuple[Any, str]

EXPORTER: ModuleType = _trace
"""The module that traces, and prints the graph so far when it fails."""
GRAD_MODE_PASS: Place = (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass")
"""(program, signature) -> the same, with regions of `no_grad` as operations of a higher order."""
AUTOCAST_PASS: Place = (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass")
"""The same for regions of `autocast`."""
ATTRIBUTE_CHECK: Place = (_trace, "_detect_attribute_assignment")
"""The context manager, given the module, in which its forward runs."""
FRAME_FILTER: Place = (TracerBase, "_filter_traceback_frames")
"""(tracer, all frames of a call) -> those that an operation remembers."""
SNAPSHOT: Place = (proxy_tensor, "snapshot_fake")
"""(fake tensor, ...) -> what the graph keeps of it, as the value of an operation."""
VALUE_CHECKS: Place = (Distribution, "_validate_args")
"""Whether torch.distributions look at the values of their arguments."""
TENSOR_CHECK: Place = (torch, "_check_tensor_all_with")
"""(error, tensor, message): raises unless all elements are true, whose values a trace does not have."""
TRANSFORMS = "torch._functorch.predispatch"
"""The module of the functions that stand in a graph for transforms of torch.func."""
