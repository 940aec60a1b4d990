"""Commands import what they need and no more: an import that is not needed is waited for each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OF_SERVERS = {"boto3", "botocore", "azure", "fastapi", "starlette", "uvicorn", "cryptography", "numba"}
OF_MODELS = {"torch", "numpy", "safetensors"}
OF_JOBS = {"pydantic", "makara.simulator", "makara.checkpoint", "makara.morphing", "makara.manager.core"}
OF_CLIENTS = {"httpx", "rich", "asyncio"}


def imported(*arguments: str, tmp_path: Path) -> set[str]:
    """The modules that are loaded after a command."""
    code = (
        "import sys\n"
        "from makara.manager.cli.main import main\n"
        "try:\n"
        f"    main({[*arguments]!r})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return {*run.stderr.split()}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], OF_SERVERS | OF_MODELS | OF_JOBS | OF_CLIENTS),
        (["apply", "--help"], OF_SERVERS | OF_MODELS | OF_JOBS | OF_CLIENTS),
        (["ps", "--home", "home"], OF_SERVERS | OF_MODELS | OF_JOBS),  # no manager has run
        (["ps", "--server", "http://127.0.0.1:9", "--token", "a.b"], OF_SERVERS | OF_MODELS | OF_JOBS),
    ],
)
def test_a_command_imports_nothing_heavy_that_it_does_not_need(
    arguments: list[str], heavy: set[str], tmp_path: Path
) -> None:
    assert not imported(*arguments, tmp_path=tmp_path) & heavy
