"""`python -m makara.worker.start MODULE ARGUMENT...`: as `python -m MODULE ARGUMENT...`, but sooner.

For the programs that load torch. That makes half a million objects, all of which stay, and Python's collector
of reference cycles would look at them again and again: a quarter of the processor time of these imports.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys


def main() -> None:
    """Import the module with the collector off, leave what it loaded out of all collections, and run its
    `main`."""
    name = sys.argv.pop(1)
    gc.disable()
    try:
        found = importlib.util.find_spec(name)
        is_package = found is not None and found.submodule_search_locations is not None
        module = importlib.import_module(f"{name}.__main__" if is_package else name)
        gc.freeze()
    finally:
        gc.enable()
    module.main()


if __name__ == "__main__":
    main()
