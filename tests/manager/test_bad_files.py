"""Job files, traces and costs that are at fault: the command names file, line, reason, and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calibrations import uniform
from makara.manager.cli import apply as cli_apply
from makara.manager.cli import main as cli
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.user_code import Trial

JOB = """\
name: gpt
workdir: .
entrypoint: train:build
resources:
  provider: local
  min_nodes: 1
  max_nodes: 6
training: {global_batch_size: 64,
           steps: 200}
checkpoint:
  uri: ./checkpoints
  interval: 10
"""
TRACE = "0,add,a\n0,add,b\n5000,remove,b\n9000,add,b\n"


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command says that ends with the status of a user's mistake; the folder is left out."""
    assert cli.main([*map(str, arguments), "--home", str(tmp_path / "home")]) == cli.MISTAKE
    said = capsys.readouterr()
    assert not said.out
    return said.err.replace(f"{tmp_path}/", "")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


# ---- job files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "steps: 200",
            "stepz: 200",
            "job.yaml:8: training.steps: is required\njob.yaml:9: training.stepz: unk",
        ),
        ("steps: 200", "steps: many", "job.yaml:9: training.steps: expected a valid integer, got 'many'"),
        (
            "max_nodes: 6",
            "max_nodes: 0",
            "job.yaml:7: resources.max_nodes: expected greater than or equal to 1",
        ),
        ("  max_nodes: 6\n", "", "job.yaml:4: resources.max_nodes: is required"),
        ("local", "moon", "job.yaml:5: resources.provider: unknown provider 'moon'; expected local"),
        (
            "min_nodes: 1",
            "min_nodes: 7",
            "job.yaml:6: resources.min_nodes: 7 is more than resources.max_nodes",
        ),
        ("interval: 10", "interval: 10y", "job.yaml:12: checkpoint.interval: '10y' is no interval; expected"),
        ("./checkpoints", "gs://b/p", "job.yaml:11: checkpoint.uri: "),
        ("name: gpt\n", "", "job.yaml:1: name: is required"),
        ("name: gpt", "name: a: b", "job.yaml:1: not YAML: mapping values are not allowed here"),
        ("  interval", "   interval", "job.yaml:12: not YAML: "),
        ("  uri", "\turi", "job.yaml:11: not YAML: found character '\\t' that cannot start any token"),
        ("name: gpt", "name: g\x07pt", "job.yaml:1: not YAML: the character U+0007 may not be in it"),
        ("name: gpt", "name: gpt\nname: bert", "job.yaml:2: name: given twice, first in line 1"),
        ("interval: 10", "uri: c", "job.yaml:12: checkpoint.uri: given twice, first in line 11"),
        ("interval: 10", "interval: 2026-99-99", "job.yaml:12: not YAML: month must be in 1..12"),
        ("steps: 200", "steps: !!int many", "job.yaml:9: not YAML: invalid literal for int()"),
        (
            "steps: 200",
            "steps: !!python/name:os.system 1",
            "job.yaml:9: not YAML: could not determine a constr",
        ),
        (
            "interval: 10",
            "interval: 10\n---\nname: b",
            "job.yaml:13: a second document begins here; give one, without ---",
        ),
        (JOB, "", "job.yaml: expected a mapping of keys to values, got nothing"),
        (JOB, "- name\n", "job.yaml: expected a mapping of keys to values, got ['name']"),
        (JOB, "[" * 5000, "job.yaml:1: not YAML: nested too deeply"),
    ],
)
def test_a_bad_job_file_is_refused_with_its_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in JOB
    job.write_text(JOB.replace(old, new, 1))
    for command in ("plan", "apply"):
        assert run(tmp_path, capsys, command, "-f", job).startswith(said)


def test_all_faults_of_a_job_file_are_told_in_the_order_of_their_lines(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace("10\n", "soon\n").replace("local", "moon").replace("name: gpt", "name: G P T"))
    said = run(tmp_path, capsys, "plan", "-f", job)
    assert [line.rpartition(" got ")[0].split(": ")[0] for line in said.splitlines()[:1]] == ["job.yaml:1"]
    assert [line.split(": ")[0] for line in said.splitlines()] == ["job.yaml:1", "job.yaml:12"]
    job.write_text(JOB.replace("./checkpoints", "gs://b").replace("local", "moon"))
    said = run(tmp_path, capsys, "plan", "-f", job)
    assert [line.split(": ")[0] for line in said.splitlines()] == ["job.yaml:5", "job.yaml:11"]


def test_a_job_file_that_is_no_utf_8_is_refused_with_its_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_bytes(JOB.replace("./checkpoints", "./pr\u00fcfpunkte").encode("latin-1"))
    assert (
        run(tmp_path, capsys, "plan", "-f", job)
        == "job.yaml:11: not UTF-8: byte 0xfc; save the file as UTF-8\n"
    )
    job.write_bytes(b"\xef\xbb\xbf" + JOB.replace("local", "moon").encode())
    assert run(tmp_path, capsys, "plan", "-f", job).startswith("job.yaml:5: resources.provider")


def test_what_is_found_after_a_job_file_was_read_has_its_line_as_well(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write_text(JOB.replace("workdir: .", "workdir: nowhere"))
    assert run(tmp_path, capsys, "plan", "-f", job) == "job.yaml:2: workdir: nowhere is no folder\n"

    job.write_text(JOB + "parallelism:\n  num_sections: 99\n")
    refused = Trial(None, "parallelism.num_sections: 99 is not in 1..2", None, None)
    monkeypatch.setattr(cli_apply, "try_out", lambda *_: refused)
    said = run(tmp_path, capsys, "plan", "-f", job)
    assert said == "job.yaml:14: parallelism.num_sections: 99 is not in 1..2\n"
    monkeypatch.setattr(
        cli_apply, "try_out", lambda *_: Trial(None, "train.py:12: if x.sum() > 0:", None, None)
    )
    assert run(tmp_path, capsys, "plan", "-f", job) == "makara: train.py:12: if x.sum() > 0:\n"

    monkeypatch.delenv("MISSING", raising=False)
    monkeypatch.setattr(cli_apply, "try_out", lambda *_: Trial({**SOUND}, None, None, None))
    job.write_text(JOB + "secrets: [MISSING]\n")
    said = run(tmp_path, capsys, "apply", "-f", job)
    assert said.splitlines()[-1] == "job.yaml:13: secrets: MISSING is not set in this environment"

    def refuse(*_: Any) -> None:
        raise RequestRefused(422, "the specification is refused", [("checkpoint.uri", "NoSuchBucket")])

    job.write_text(JOB)
    monkeypatch.setattr(cli_apply, "connect", refuse)
    said = run(tmp_path, capsys, "apply", "-f", job)
    assert said.splitlines()[-1] == "job.yaml:11: checkpoint.uri: NoSuchBucket"


SOUND = {"seconds": 0.1, "not_compared": "", "largest_differences": {}}


# ---- traces and costs --------------------------------------------------------------------------------------


def simulate(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], **files: str | bytes) -> str:
    """What `makara simulate` says of these files."""
    given: dict[str, str | bytes] = {"trace": TRACE, "calibration": json.dumps(uniform(4).to_json()), **files}
    arguments: list[object] = []
    for name, content in given.items():
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        arguments += [f"--{name}", path]
    return run(tmp_path, capsys, "simulate", "-f", job, *arguments)


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("", "trace:1: the trace is empty; expected rows ms,add|remove,node, or seconds,count"),
        ("\n \n", "trace:1: the trace is empty"),
        ("0,ad,a\n", "trace:1: 'ad' is neither add nor remove; did you mean add?"),
        ("0,add,a\n9,stop,a\n", "trace:2: 'stop' is neither add nor remove"),
        (
            "0,add,a\n9,add,b\n\n5,remove,b\n",
            "trace:4: 5 ms comes after 9 ms (line 2); rows must be in the ord",
        ),
        ("0,add,a\n9,add,a\n", "trace:2: 'a' is added, but is there already, since line 1; expected its rem"),
        ("0,add,a\n9,remove,b\n", "trace:2: 'b' is removed, but was never added; expected a node that is th"),
        ("0,add,a\n3,remove,a\n9,remove,a\n", "trace:3: 'a' is removed, but went in line 2"),
        ("0,add,a\n1.5,add,b\n", "trace:2: '1.5' is not a whole number of milliseconds >= 0"),
        ("0,add,a\n-5,add,b\n", "trace:2: '-5' is not a whole number of milliseconds >= 0"),
        ("0,add,\n", "trace:1: the node has no name; expected one in the third column"),
        ("0,add,a\n9,add\n", "trace:2: '9,add': expected 3 columns (ms,add|remove,node), got 2"),
        ("time,event,node\n0,add,a\n", "trace:1: 'time,event,node': expected rows ms,add|remove,node"),
        (
            "time,nodes\n0,3\n",
            "trace:1: 'time,nodes': expected rows seconds,count, or the header seconds,count",
        ),
        ("0,3\n60,many\n", "trace:2: 'many' is not a number of nodes from 0 to 100000"),
        ("0,3\n60,-1\n", "trace:2: '-1' is not a number of nodes"),
        ("seconds,count\n0,3\nsoon,1\n", "trace:3: 'soon' is not a number of seconds >= 0"),
        ("0,3\n60,2\n60,1\n", "trace:3: 60 s does not come after 60 s; expected one row for each time"),
        ("0,3\n60\n", "trace:2: '60': expected 2 columns (seconds,count), got 1"),
        (b"0,add,a\n9,add,\xe4\n", "trace:2: not UTF-8: byte 0xe4"),
        (b"\x89PNG\r\n\x1a\n", "trace:1: not UTF-8: byte 0x89"),
        ('0,add,a\n5,add,"' + "b" * 200_000, "trace:2: not CSV: field larger than field limit"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str | bytes, said: str
) -> None:
    assert simulate(job, tmp_path, capsys, trace=trace).startswith(said)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ('{"boot_s": 9,\n "form_s": -1}', "costs:2: form_s: expected greater than or equal to 0, got -1"),
        (
            '{"boot_s": 9,\n "form": 1}',
            "costs:2: form: unknown key; did you mean form_s? (accepted here: boot_s",
        ),
        ('{"boot_s": 9,\n\n "boot_s": 1}', "costs:3: boot_s: given twice, first in line 1"),
        ('{"boot_s": 9\n "form_s": 1}', "costs:2: not JSON: Expecting ',' delimiter (column 2)"),
        ('{\n"morphs": [1]}', "costs:2: morphs: not as `makara status --json` prints them"),
        ("[]", "costs:1: costs: expected a mapping of keys to values, got []"),
        ("", "costs:1: not JSON"),
        (b"{\n\xff}", "costs:2: not UTF-8: byte 0xff"),
    ],
)
def test_bad_costs_are_refused_with_their_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: str | bytes, said: str
) -> None:
    assert simulate(job, tmp_path, capsys, costs=costs).startswith(said)


def test_a_job_file_that_does_not_fit_the_calibration_has_its_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = json.dumps(uniform(4, microbatch_size=5).to_json())
    said = simulate(job, tmp_path, capsys, calibration=calibration)
    assert said.startswith(
        "job.yaml:8: training.global_batch_size: 64 is not divisible by the m that was measured (5)"
    )


def test_a_file_that_is_not_there_is_named(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(tmp_path, capsys, "simulate", "-f", job, "--trace", tmp_path / "none", "--calibration", "none")
    assert said == "none: cannot read it: No such file or directory\n"
    said = run(tmp_path, capsys, "plan", "-f", tmp_path / "none.yaml")
    assert said == "none.yaml: cannot read it: No such file or directory\n"
