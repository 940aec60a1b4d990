"""What a command writes while its user waits, on a terminal or in a file."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from typing import Any

from makara.manager.cli.progress_lines import ProgressLines
from makara.manager.cli.stages import Stages
from makara.manager.cli.user_code import _output
from makara.protocol.stages import STAGE
from rich.console import Console

VIEW: dict[str, Any] = {
    "job": "j", "status": "starting", "steps": 150, "step": 0, "loss": None, "samples_per_s": None,
    "shape": None, "doing": "waiting for 2 VMs", "vms": [], "morphs": [], "reason": "",
}  # fmt: skip


def test_a_stage_is_named_at_once_and_again_while_it_lasts() -> None:
    lines: list[str] = []
    third = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            third.set()

    with Stages(write, every_s=0.01) as stages:
        stages.begin("packing the code")
        assert lines == ["packing the code ..."]
        assert third.wait(60)
    assert lines[1].startswith("packing the code: ")
    number = len(lines)
    assert lines[number:] == []


def test_the_process_that_tries_the_code_names_its_stages_and_nothing_it_prints_is_lost() -> None:
    code = (
        "import sys\n"
        f"print('{STAGE}tracing', file=sys.stderr, flush=True); print('a warning', file=sys.stderr)\n"
        "sys.stderr.write('x' * 200_000 + chr(10)); sys.stderr.buffer.write(bytes([0xff])); print('answer')"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
    stages: list[str] = []
    printed, errors = _output(process, stages.append)
    assert (printed, stages, process.returncode) == ("answer\n", ["tracing"], 0)
    assert errors.startswith("a warning\nxxx")


def test_without_a_terminal_changes_are_printed_at_once_and_steps_every_few_seconds() -> None:
    now = [100.0]
    file = io.StringIO()
    running = {**VIEW, "status": "running", "shape": "2x1", "doing": "", "samples_per_s": 12.0, "loss": 2.5}
    with ProgressLines(Console(file=file, width=40), lambda: now[0]) as display:
        display.show(VIEW)
        display.show(VIEW)
        display.show({**running, "step": 1})
        for step in range(2, 12):
            now[0] += 1
            display.show_step({"step": step, "loss": 2.0})
        display.show({**running, "step": 11, "status": "finished"})
    assert [line.split("  ")[0].strip() for line in file.getvalue().splitlines()] == [
        "starting", "running", "running", "running", "finished",
    ]  # fmt: skip
    starting, first, second, third, last = file.getvalue().splitlines()
    assert starting.endswith("step 0/150  waiting for 2 VMs")
    assert "step 1/150  loss 2.500  12 samples/s  2x1 (PxD)" in first
    assert "step 6/150  loss 2.000" in second
    assert "step 11/150" in third
    assert "step 11/150" in last
