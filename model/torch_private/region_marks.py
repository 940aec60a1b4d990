"""The functions that stand in a traced graph where a `no_grad` or `autocast` region begins or ends.

torch.export writes them down before its own passes, which lose some regions; there are no public names for
them. Checked with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import autocast_mode

ENTER_AUTOCAST: Any = autocast_mode._enter_autocast  # pyright: ignore[reportPrivateUsage]
EXIT_AUTOCAST: Any = autocast_mode._exit_autocast  # pyright: ignore[reportPrivateUsage]
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]
