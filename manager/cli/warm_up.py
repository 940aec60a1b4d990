"""Loads the compiled simulator for commands that simulate much."""

from __future__ import annotations

import gc
import sys
import threading

from ...simulator import warm_up

_PATIENCE_S = 2.0


def wait_for_code() -> None:
    """Load the compiled simulator if numba is installed, which takes a third of a second."""
    notice = threading.Timer(
        _PATIENCE_S, print, ("compiling the simulator, once on this machine",), {"file": sys.stderr}
    )
    notice.start()
    gc.disable()  # the loaded objects stay, so collections would traverse them in vain
    try:
        warm_up(wait=True)
        gc.freeze()
    finally:
        gc.enable()
        notice.cancel()
