"""Two workers that both live but cannot reach each other: found within seconds, by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"


def _can_make_namespaces() -> bool:
    try:
        made = subprocess.run(
            ["unshare", "-rn", "ip", "link", "add", "hub", "type", "bridge"], capture_output=True
        )
    except FileNotFoundError:
        return False
    return made.returncode == 0


@pytest.mark.skipif(not _can_make_namespaces(), reason="this kernel gives users no network namespaces")
@pytest.mark.parametrize("scenario", ["never-formed", "cut-in-a-step"])
def test_a_link_cut_between_two_living_workers_is_noticed_by_its_ends(scenario: str, tmp_path: Path) -> None:
    command = ["unshare", "-rn", sys.executable, str(SUPPORT / "cut_links.py"), scenario, str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
