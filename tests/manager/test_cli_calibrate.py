"""`makara calibrate`: measured here, of a job, of a file; as a table, a picture and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from calibrations import measured, uniform
from makara.manager.cli import main as cli
from makara.simulator import Measurements
from makara.simulator.calibration.links import AllReduce, MeasuredWire
from makara.simulator.calibration.statistics import Figure
from managers import Manager, release_all
from trainer_processes import BUNDLE

SVG = "{http://www.w3.org/2000/svg}"
JOB = """
name: mlp
workdir: {workdir}
entrypoint: models:untied_mlp
resources: {{provider: local, max_nodes: 2}}
training: {{global_batch_size: 16, steps: 4}}
parallelism: {{microbatch_size: 2}}
checkpoint: {{uri: {store}}}
"""


def wire(*, same_vm: bool) -> MeasuredWire:
    return MeasuredWire(
        same_vm=same_vm,
        latency_s=Figure(2e-4, 1e-5, 30, 1),
        bytes_per_s=Figure(1.25e9, 1e6, 5, 0),
        loaded=True,
        source="workers",
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    sums = [
        AllReduce(same_vm=False, ring=2, size_bytes=1 << 20, in_flight=1, seconds=Figure(0.01, 0.0, 3, 0))
    ]
    found = measured(uniform(3, labels=("embed", "block <1>", "head")), "5ec7")
    path = tmp_path / "calibration.json"
    path.write_text(found.with_links([wire(same_vm=False)], sums).to_text())
    return path


def test_a_file_is_shown_as_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(file)]) == 0
    shown = capsys.readouterr().out
    for text in ("a processor, 2 cores", "block <1>", "1.50 s", "±10%", "computing beside it", "1.05 MB"):
        assert text in shown
    assert "within a VM" in shown
    assert "assumed as the other" in shown


def test_the_picture_has_a_bar_for_each_section(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "calibration.svg"
    assert cli.main(["calibrate", str(file), "--plot", str(picture)]) == 0
    bars = [bar for bar in ElementTree.fromstring(picture.read_text()).iter(f"{SVG}rect") if len(bar)]
    assert len(bars) == 2 * 3  # forward and backward


def test_json_is_what_the_file_holds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(file), "--json"]) == 0
    assert Measurements.from_json(capsys.readouterr().out) == Measurements.from_json(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}", "-m", "7"], "7 was not measured; measured are 2"),
        (["{bad}"], "{bad}:5: basis.graph_hash: expected a valid string, got 5"),
        (["{missing}"], "cannot read it"),
        ([], "give either a job or a calibration file"),
        (["{file}", "-o", "/dev/null/x"], "cannot write it"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    bad = file.with_name("bad.json")
    bad.write_text(file.read_text().replace('"graph_hash": "5ec7"', '"graph_hash": 5', 1))
    names = {"file": str(file), "bad": str(bad), "missing": str(file.with_name("none.json"))}
    assert cli.main(["calibrate", *(argument.format(**names) for argument in arguments)]) == cli.MISTAKE
    assert message.format(**names) in capsys.readouterr().err


def test_a_job_file_is_measured_here_and_its_own_jobs_find_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(workdir=BUNDLE, store=tmp_path / "store"))
    output = tmp_path / "calibration.json"
    assert cli.main(["calibrate", "-f", str(job), "-o", str(output), "--store", "--seconds", "20"]) == 0
    found = Measurements.from_json(output.read_text())
    assert {1, 2} <= set(found.sizes)
    assert found.basis is not None
    assert found.basis.microbatch_size == 2
    stored = tmp_path / "store" / "calibrations" / f"{found.basis.fingerprint}.json"
    assert stored.read_text() == output.read_text()
    assert "over loopback, not between workers" in capsys.readouterr().out


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(tmp_path / "home").start()
    yield running
    running.stop()
    release_all(running.home)


def test_a_job_of_the_manager_is_shown(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    manager.wait(job, lambda view: view["microbatch_size"])
    assert cli.main(["calibrate", job, "--json", "--home", str(manager.home)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["graph_hash"] == "scripted"
    assert cli.main(["calibrate", "nothing", "--home", str(manager.home)]) == cli.MISTAKE


def test_a_reader_that_has_enough_is_no_fault(file: Path) -> None:
    command = [sys.executable, "-u", "-m", "makara.manager.cli", "calibrate", str(file)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141
