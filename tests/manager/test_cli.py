"""The command line: what it refuses, with which exit status, and what it sends."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from core_script import Script
from makara.manager.cli import apply as cli_apply
from makara.manager.cli import main as cli
from makara.manager.cli import show
from makara.manager.cli.bundle import BundleError, linked_folders, pack
from makara.manager.cli.progress import ProgressDisplay, describe_morph
from makara.manager.cli.progress_lines import ProgressLines
from makara.manager.core.events import StopRequested
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import JobView, job_view
from managers import Manager, release_all
from rich.console import Console
from rich.table import Table
from service_process import ServiceProcess

JOB: dict[str, Any] = {
    "name": "scripted",
    "entrypoint": "train:build",
    "resources": {"provider": "local", "max_nodes": 1},
    "training": {"global_batch_size": 4, "steps": 12},
    "checkpoint": {"uri": "./checkpoints", "interval": 5},
}
RENTED = {"provider": "aws", "region": "us-east-1", "instance_type": "m5.large", "max_nodes": 1}
MODEL = {
    "num_parameters": 1200, "num_sections": 2, "shared_parameters": {"w": [0, 1]}, "seconds": 1.0,
    "not_compared": None, "notes": [], "largest_differences": {"loss": 0.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("cli") / "home").start()
    yield running
    running.stop()
    release_all(running.home)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("def build(): ...\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code passes: its check needs torch, which these tests do without."""
    monkeypatch.setattr(cli_apply, "check_code", lambda spec, workdir, *, compare, begin: MODEL)


def run(manager: Manager, *arguments: object) -> int:
    return cli.main([*(str(a) for a in arguments), "--home", str(manager.home)])


@pytest.mark.usefixtures("passing")
def test_apply_follows_a_job_to_its_end(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manager, "apply", "-f", job_file) == 0
    shown = capsys.readouterr().out
    assert "accepted" in shown
    assert "finished" in shown
    assert "morph 1" in shown
    assert "weight hash" in shown
    assert (job_file.parent / "checkpoints").is_dir()  # relative to the job file, not to where we are


@pytest.mark.usefixtures("passing")
def test_a_detached_job_is_listed_shown_and_stopped(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(yaml.safe_dump(JOB | {"training": {"global_batch_size": 4, "steps": 10**6}}))
    assert run(manager, "apply", "-f", job_file, "--detach", "--json") == 0
    job = json.loads(capsys.readouterr().out)["job"]
    manager.wait(job, lambda view: view["step"] > 0)
    for command in (["ps"], ["status", job], ["events", job], ["events", job, "--why"], ["logs", job]):
        assert run(manager, *command) == 0
        assert capsys.readouterr().out
        assert run(manager, *command, "--json") == 0
        json.loads(capsys.readouterr().out)
    assert run(manager, "stop", job) == 0
    capsys.readouterr()
    assert run(manager, "follow", job, "--json") == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["status"]) == ("status", "stopped")


@pytest.mark.usefixtures("passing")
def test_a_name_means_its_newest_job_and_an_unknown_one_says_what_may_be_meant(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(yaml.safe_dump(JOB | {"name": "named"}))
    ids: list[str] = []
    for _ in range(2):
        assert run(manager, "apply", "-f", job_file, "--detach", "--json") == 0
        ids.append(json.loads(capsys.readouterr().out)["job"])
        manager.wait(ids[-1], lambda view: view["status"] == "finished")
    older, newer = ids
    for command in (["status"], ["stop"], ["follow"]):
        assert run(manager, *command, "named") == 0
        said = capsys.readouterr().out
        assert newer in said, command
        assert older not in said, command
    for command in (["events"], ["logs"], ["calibrate"]):
        assert run(manager, *command, "named", "--json") == 0
        by_name = capsys.readouterr().out
        assert run(manager, *command, newer, "--json") == 0
        assert capsys.readouterr().out == by_name
    assert run(manager, "resume", "named") == cli.MISTAKE
    assert f"job {newer} is finished" in capsys.readouterr().err
    for said, meant in (("nmaed", "named"), (newer[:-2], newer)):
        assert run(manager, "status", said) == cli.MISTAKE
        assert capsys.readouterr().err == f"makara: there is no job '{said}'; did you mean {meant}?\n"
    assert run(manager, "status", "zzz") == cli.MISTAKE
    assert capsys.readouterr().err == "makara: there is no job 'zzz'; `makara ps` lists all\n"


@pytest.mark.usefixtures("passing")
def test_leaving_with_control_c_leaves_the_job_alone(
    manager: Manager, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    job_file.write_text(yaml.safe_dump(JOB | {"training": {"global_batch_size": 4, "steps": 10**6}}))
    monkeypatch.setattr(ProgressLines, "show", interrupt)
    assert run(manager, "apply", "-f", job_file) == 0
    shown = capsys.readouterr().out
    assert "the job goes on" in shown
    job = shown.split()[1]
    assert manager.client.get(f"/jobs/{job}")["status"] not in ("stopping", "stopped", "failed")
    manager.client.post(f"/jobs/{job}/stop")


def test_a_faulty_file_names_field_and_line(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(job_file.read_text() + "colour: red\n")
    assert run(manager, "apply", "-f", job_file) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{job_file}:12: colour: unknown key")


def test_a_missing_file_or_folder_is_the_users_mistake(
    manager: Manager, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manager, "apply", "-f", tmp_path / "none.yaml") == 2
    job_file.write_text(yaml.safe_dump(JOB | {"workdir": "nowhere"}))
    assert run(manager, "plan", "-f", job_file) == 2
    assert "workdir" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["check"], ["calibrate"]])
def test_a_path_in_the_home_of_an_unknown_user_is_the_users_mistake(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: a traceback, where the path is no option but an argument that may be another thing."""
    assert cli.main([*command, "~no-such-user/x.yaml"]) == 2
    assert "the home folder ~no-such-user is not known on this machine" in capsys.readouterr().err


@pytest.mark.usefixtures("passing")
def test_a_fault_that_only_the_manager_finds_has_status_2(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(yaml.safe_dump(JOB | {"checkpoint": {"uri": "file:///dev/null/x"}}))
    assert run(manager, "apply", "-f", job_file) == 2
    assert "checkpoint.uri" in capsys.readouterr().err


def test_what_the_manager_refuses_is_said_before_the_code_is_tried(
    manager: Manager, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(
        cli_apply, "check_code", lambda spec, workdir, *, compare, begin: tried.append(workdir) or MODEL
    )
    before = manager.client.get("/jobs")
    job_file.write_text(yaml.safe_dump(JOB | {"checkpoint": {"uri": "file:///dev/null/x"}}))
    assert run(manager, "apply", "-f", job_file) == cli.MISTAKE
    assert "job.yaml:2: checkpoint.uri: file:///dev/null/x" in capsys.readouterr().err
    job_file.write_text(yaml.safe_dump(JOB | {"resources": RENTED}))
    assert run(manager, "apply", "-f", job_file) == cli.MISTAKE
    assert run(manager, "apply", "-f", job_file, "--token", "a.b") == cli.MISTAKE
    assert tried == []
    assert manager.client.get("/jobs") == before


@pytest.mark.usefixtures("passing")
def test_without_a_manager_the_status_is_3(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", "--home", str(tmp_path / "home")]) == 3
    assert "makara server" in capsys.readouterr().err
    nobody = ["--server", "http://127.0.0.1:9", "--token", "a.b", "--home", str(tmp_path)]
    assert cli.main(["apply", "-f", str(job_file), *nobody]) == 3


def test_a_wrong_token_is_said(manager: Manager, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(manager, "ps", "--token", "a.b") == 2
    assert "unknown token" in capsys.readouterr().err


@pytest.mark.usefixtures("passing")
def test_secrets_come_from_the_environment(
    manager: Manager, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(yaml.safe_dump(JOB | {"secrets": ["MY_KEY"]}))
    monkeypatch.delenv("MY_KEY", raising=False)
    assert run(manager, "apply", "-f", job_file, "--detach") == 2
    assert "MY_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "hush")
    assert run(manager, "apply", "-f", job_file, "--json") == 0
    job = json.loads(capsys.readouterr().out.splitlines()[0])["job"]
    assert not (manager.home / "jobs" / job / "secrets.json").exists()  # its store needs none


@pytest.mark.usefixtures("passing")
def test_plan_shows_the_job_and_submits_nothing(
    manager: Manager, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manager, "apply", "-f", job_file) == 0  # its VMs measure the model
    before = len(manager.client.get("/jobs")["jobs"])
    capsys.readouterr()
    assert run(manager, "plan", "-f", job_file, "--nodes", 3) == 0
    shown = capsys.readouterr().out
    assert "1,200 parameters in 2 sections" in shown
    assert "<- best" in shown
    assert "calibration: measured on the VMs of job scripted-" in shown
    assert len(manager.client.get("/jobs")["jobs"]) == before


def test_the_server_listens_beyond_loopback_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["server", "--home", str(tmp_path / "home"), "--host", "0.0.0.0"]) == 2
    assert "--allow-remote" in capsys.readouterr().err
    assert cli.main(["server", "--home", str(tmp_path / "home"), "--port", "70000"]) == 2


def test_a_manager_says_which_bounds_differ_and_which_are_no_longer_set(tmp_path: Path) -> None:
    """Found: a restart without the flags went back to the defaults, and nothing said so."""
    told: list[str] = []
    for bounds in (["--bound=settle_s=4", "--bound=slow_call_s=50"], ["--bound=settle_s=4"]):
        command = [sys.executable, "-m", "makara.manager.cli", "server", "--port=0", f"--home={tmp_path}"]
        command += bounds
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("manager at")
            process.terminate()
            told.append(process.communicate()[1])
    assert "bounds: settle_s=4 (default 3), slow_call_s=50 (default 30)" in told[0]
    assert "bound slow_call_s is 30; the manager before had 50" in told[1]
    assert "bound settle_s" not in told[1]


def test_a_users_token_is_made_listed_and_revoked(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manager, "token", "add", "ada", "--days", 1) == 0
    token = capsys.readouterr().out.strip()
    assert run(manager, "ps", "--token", token) == 0
    assert run(manager, "token", "list", "--token", token) == cli.MISTAKE
    assert "admin token" in capsys.readouterr().err
    assert run(manager, "token", "list") == 0
    assert re.search(rf"^{token.partition('.')[0]} +ada +user ", capsys.readouterr().out, re.MULTILINE)
    assert run(manager, "token", "add", "bob", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["token"].startswith(made["id"] + ".")
    assert run(manager, "token", "list", "--json") == 0
    listed = {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)["tokens"]}
    ada, bob = listed[token.partition(".")[0]], listed[made["id"]]
    assert ada["expires_at"] == pytest.approx(ada["created_at"] + 86400.0)
    assert bob["expires_at"] is None
    assert {entry["scope"] for entry in listed.values()} == {"admin", "user"}
    assert run(manager, "token", "revoke", made["id"]) == 0
    assert run(manager, "ps", "--token", made["token"]) == cli.MISTAKE
    assert run(manager, "token", "revoke", made["id"]) == cli.MISTAKE
    assert run(manager, "token", "add", "eve", "--days", 0) == cli.MISTAKE


def test_commands_that_need_no_manager_import_no_client_of_it() -> None:
    code = (
        "import sys, makara.manager.cli\n"
        "heavy = {'httpx', 'rich', 'fastapi', 'numba', 'numpy', 'makara.checkpoint'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_but_the_check_needs_torch() -> None:
    modules = "makara.manager.cli, makara.manager.server, makara.manager.cli.demo"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


# ---- bundles -----------------------------------------------------------------------------------------------


def names(bundle: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
        return archive.getnames()


def test_a_bundle_is_the_same_whenever_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("1")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").write_text("2")
    first = pack(tmp_path, max_bytes=10**6)
    os.utime(tmp_path / "b.py", (1, 1))
    assert hashlib.sha256(pack(tmp_path, max_bytes=10**6)).digest() == hashlib.sha256(first).digest()
    assert names(first) == ["a/c.py", "b.py"]


def test_a_bundle_leaves_out_what_no_job_needs(tmp_path: Path) -> None:
    for name in (".git/x", "__pycache__/x.pyc", "checkpoints/x", "data/big.bin", "keep.py", "run.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / ".makaraignore").write_text("# data\ndata/*.bin\n")
    bundle = pack(tmp_path, max_bytes=10**6, also_exclude=(tmp_path / "checkpoints",))
    assert names(bundle) == [".makaraignore", "keep.py", "run.sh"]
    with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
        assert stat.S_IMODE(archive.getmember("run.sh").mode) == 0o755


def test_links_to_folders_are_left_out_and_named(tmp_path: Path) -> None:
    """Found: data behind a link were there for the check, and the job had none."""
    workdir, data = tmp_path / "work", tmp_path / "data"
    for folder in (workdir / "more", data):
        folder.mkdir(parents=True)
    (workdir / "train.py").write_text("1")
    (data / "x").write_text("2")
    for link, target in (("images", data), ("more/logs", data), ("more/x", data / "x"), ("runs", data)):
        (workdir / link).symlink_to(target)
    (workdir / ".makaraignore").write_text("logs\n")
    assert names(pack(workdir, max_bytes=10**6)) == [".makaraignore", "more/x", "train.py"]
    assert linked_folders(workdir) == ["images", "runs"]
    assert linked_folders(workdir, (data,)) == [], "checkpoints are no part of the code"


def test_a_bundle_that_is_too_large_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(os.urandom(5000))
    with pytest.raises(BundleError) as refusal:
        pack(tmp_path, max_bytes=1000)
    told = str(refusal.value)
    assert "when packed, and the manager takes 1000 bytes (largest: big.bin 4.883 KiB)" in told
    assert ".makaraignore" in told
    assert "--max-bundle" in told


def test_code_that_the_manager_would_not_take_is_refused_before_it_is_tried(
    job_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found: more than 64 MiB beside the code were refused after half a minute, and nothing set the limit."""
    tried: list[Path] = []
    monkeypatch.setattr(
        cli_apply, "check_code", lambda spec, workdir, *, compare, begin: tried.append(workdir) or MODEL
    )
    (job_file.parent / "data.bin").write_bytes(os.urandom(5000))
    service = ServiceProcess(tmp_path_factory.mktemp("small"), options=("--max-bundle", "1KiB"))
    service.start()
    try:
        apply = ["apply", "-f", str(job_file), "--detach", "--home", str(service.home)]
        assert cli.main(apply) == 2
        assert tried == []
        told = " ".join(capsys.readouterr().err.split())
        assert "and the manager takes 1 KiB (largest: data.bin 4.883 KiB" in told
        (job_file.parent / ".makaraignore").write_text("data.bin\n")
        assert cli.main(apply) == 0
        assert tried == [job_file.parent]
    finally:
        service.close()


def test_names_in_tables_are_whole_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: `makara ps` cut ids off in 80 columns, and in a pipe, as `my-favourite…`."""
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("JOB", "SUBMITTED", box=None, pad_edge=False)
    table.add_row("a-job-" * 10, "11-23 10:50:54")
    show.print_table(table)
    assert [line.split(None, 1)[0] for line in capsys.readouterr().out.splitlines()] == ["JOB", "a-job-" * 10]


def test_a_job_without_local_vms_says_where_its_logs_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: `makara logs` printed nothing of a job on machines that joined, with status 0."""

    def get(path: str, vm: str | None) -> dict[str, Any]:
        return {"logs": {}}

    client = SimpleNamespace(get=get)
    monkeypatch.setattr(show, "connect", lambda options: nullcontext(client))
    assert show.logs(argparse.Namespace(job="j", vm=None, json=False)) == 0
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("no logs: ")) == ("", True)


def test_weights_are_not_copied_into_a_folder_that_is_named_as_a_file_of_another_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: `--to model.pt` made a folder of that name."""
    (tmp_path / "there.pt").mkdir()
    for name, told in (("model.pt", "written as safetensors"), ("there.pt", "no manager has run")):
        assert cli.main(["export", "j", "--home", str(tmp_path), "--to", str(tmp_path / name)]) != 0
        assert told in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"makara {version('makara')}\n"


def test_a_morph_is_one_line() -> None:
    morph = {
        "generation": 3, "before": "3x2", "shape": "2x2", "step": 40, "rung": "peers", "cause": "vm1 died",
        "lost_steps": 1, "phases_s": {"decide": 0.012, "form": 1.5},
    }  # fmt: skip
    change = "morph 3  3x2 -> 2x2  (step 40, vm1 died, state from peers, 1 step done again)"
    assert describe_morph(morph) == f"{change}  ms: decide 12  form 1500"
    kept = {"lost_steps": 0, "in_flight": {"kept": 11.25, "moved": 2.5, "left": 4.75}}
    change = change.replace(
        "1 step done again)", "11.2 of 16 micro-batches kept (2.5 moved, 4.75 left to do))"
    )
    assert describe_morph(morph | kept) == f"{change}  ms: decide 12  form 1500"
    kept["in_flight"] |= {"dropped": 1.5}
    change = change.replace("4.75 left to do", "4.75 left to do, 1.5 dropped for want of memory")
    assert describe_morph(morph | kept) == f"{change}  ms: decide 12  form 1500"
    kept["in_flight"] |= {"took_s": 38.12, "undisturbed_s": 17.0}
    change = change.replace("memory)", "memory), the step took 38.1 s instead of 17")
    assert describe_morph(morph | kept) == f"{change}  ms: decide 12  form 1500"
    morph["phases_s"]["first_step"] = 9.0
    assert describe_morph(morph | kept).endswith("form 1500; then the rest of the step 9000")
    assert f"({morph['cause']}, not formed)" in describe_morph(morph | {"step": None, "rung": None})
    assert describe_morph(morph).endswith("form 1500; then the first step 9000")


def test_an_event_says_what_of_a_step_was_kept() -> None:
    """Found: the line was cut before it."""
    formed = {
        "generation": 3, "step": 40, "rung": "peers", "phases_s": {"rendezvous": 0.25, "agree": 0.5},
        "in_flight": {"kept": 588, "moved": 0, "missing": 436, "dropped": 0},
    }  # fmt: skip
    said = show.describe(
        {"fact": "generation_formed", "at": 1.0, "number": 3, "formed": formed, "lost_steps": 0}
    )
    assert "step=40 rung=peers contributions_kept=588 contributions_left=436 form_s=0.75" in said


@pytest.mark.usefixtures("passing")
def test_a_job_that_ran_gives_the_calibration_for_its_replay(
    manager: Manager, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n")
    arguments = ["simulate", "-f", job_file, "--trace", trace, "--hours", 1, "--json"]
    assert run(manager, "apply", "-f", job_file) == 0
    capsys.readouterr()
    assert run(manager, *arguments) == 0
    (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert outcome["finished"]
    assert outcome["steps"] == 12
    job_file.write_text(yaml.safe_dump({**JOB, "name": "stranger"}))
    assert run(manager, *arguments) == cli.MISTAKE
    assert "has measured no job named 'stranger'; give --calibration" in capsys.readouterr().err


class Older:
    """A client of a manager whose views lack all that came later."""

    later: ClassVar[set[str]] = {
        "doing", "waiting", "isolated", "stalled", "notes", "max_nodes", "secrets", "cost", "num_vms",
        "notice",
    }  # fmt: skip

    def __init__(self, view: JobView) -> None:
        self._view = self._without(view.model_dump(mode="json"))
        self._view["vms"] = [self._without(vm) for vm in self._view["vms"]]

    def _without(self, value: dict[str, Any]) -> dict[str, Any]:
        return {name: item for name, item in value.items() if name not in self.later}

    def get(self, path: str) -> dict[str, Any]:
        return {"jobs": [self._view]} if path == "/jobs" else self._view

    def get_all(self, path: str, *_: str) -> dict[str, Any]:
        return self.get(path)  # it has no pages

    def __enter__(self) -> Older:
        return self

    def __exit__(self, *about: object) -> None:
        pass


def test_jobs_of_a_manager_that_is_older_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: `makara status` ended with KeyError 'cost'."""
    running, stopped = Script(), Script()
    running.run(2)
    stopped.submit()
    stopped.event(StopRequested(now=stopped.now))
    for script, status in ((running, "running"), (stopped, "stopped")):
        job = Job("j", [], [])
        job.state, job.observations = script.state, script.observations
        older = Older(job_view(job, {}, script.now))
        monkeypatch.setattr(show, "connect", lambda options, older=older: older)
        options = argparse.Namespace(job="j", json=False)
        assert show.status(options) == 0
        assert show.ps(options) == 0
        assert f"j  {status}" in capsys.readouterr().out
        with ProgressDisplay(Console(file=io.StringIO())) as display:
            display.show(older.get("/jobs/j"))


def test_a_line_about_the_running_plan_is_printed_when_it_changes() -> None:
    shown = io.StringIO()
    with ProgressDisplay(Console(file=shown)) as display:
        for line in ("a death costs 5 s", "a death costs 5 s", "", "a death costs 30 s"):
            display.tell(line)
    assert [line.count("5 s") for line in shown.getvalue().splitlines() if "death" in line] == [1, 0]
