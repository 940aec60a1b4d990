"""Environment variables and the command `setup` of a job, as large as Linux takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from ...simulator.validation import shown

_MAX_STRING_BYTES = 128 << 10  # execve(2): MAX_ARG_STRLEN, 32 pages, the closing NUL included
_MAX_ENVS_BYTES = 256 << 10  # of all; argument and environment together may have 2 MiB, others' included
_FILE = "put it into a file below workdir, and read it there"


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
        raise ValueError(f"{shown(value)} is no name of an environment variable")
    return value


Variable = Annotated[str, AfterValidator(_variable)]


def environment_faults(envs: Mapping[str, str], setup: str | None) -> list[tuple[str, str]]:
    """[(field, message)]: what no process could be started with."""
    sizes = {name: len(f"{name}={value}".encode()) + 1 for name, value in envs.items()}
    faults = [
        (f"envs.{name}", f"has {size:,} bytes with its name, and Linux takes {_MAX_STRING_BYTES:,}; {_FILE}")
        for name, size in sizes.items()
        if size > _MAX_STRING_BYTES
    ]
    whole = sum(sizes.values())
    if not faults and whole > _MAX_ENVS_BYTES:
        faults = [("envs", f"has {whole:,} bytes; at most {_MAX_ENVS_BYTES:,} are accepted; {_FILE}")]
    if setup is not None and len(setup.encode()) >= _MAX_STRING_BYTES:
        about = "has {:,} bytes, and a shell's command may have {:,}; put it into a script below workdir"
        faults.append(("setup", about.format(len(setup.encode()), _MAX_STRING_BYTES - 1)))
    return faults
