"""Compiled code for commands that simulate much."""

from __future__ import annotations

import gc
import sys
import threading

from ...simulator import warm_up

_PATIENCE_S = 2.0


def wait_for_code() -> None:
    """Load the compiled simulator where numba is installed: it is worth the third of a second."""
    notice = threading.Timer(
        _PATIENCE_S, print, ("compiling the simulator, once on this machine",), {"file": sys.stderr}
    )
    notice.start()
    gc.disable()  # what is loaded stays: collections would look at all of it in vain, now and later
    try:
        warm_up(wait=True)
        gc.freeze()
    finally:
        gc.enable()
        notice.cancel()
