"""The programs that load torch are imported with Python's collector off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, json, sys

while_imported = gc.isenabled()
kept = [[] for _ in range(1000)]

def main():
    collected = any(tracked is kept for tracked in gc.get_objects())
    print(json.dumps([while_imported, gc.isenabled(), collected, sys.argv[1:]]))
"""


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "makara.worker.start", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_a_program_loads_is_left_out_of_collections_and_what_it_makes_later_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    answer = started(tmp_path, "program", "--fd", "3")
    assert json.loads(answer.stdout) == [False, True, False, ["--fd", "3"]], answer.stderr


def test_a_program_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise LookupError('no such device')\n")
    answer = started(tmp_path, "program")
    assert answer.returncode == 1
    assert answer.stderr.endswith("LookupError: no such device\n")
