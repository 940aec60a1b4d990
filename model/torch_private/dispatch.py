"""Every operation on tensors on its way to its kernel (`torch.utils._python_dispatch`).

A `TorchDispatchMode` sees the operations, also those inside composite ones, which the public
`TorchFunctionMode` does not; `no_modes` lets operations on real tensors through while fake ones are made.
Checked with torch 2.13.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils import _python_dispatch  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def no_modes() -> AbstractContextManager[Any]:
    """Operations inside meet no mode, also not that of fake tensors."""
    return _python_dispatch._disable_current_modes()  # pyright: ignore[reportPrivateUsage]
