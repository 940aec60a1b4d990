"""Bad input is refused by name and leaves nothing: code by `makara apply`, specifications by the API."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from bad_code import FAULTS, GOOD, check, faulty
from makara.manager.cli import main as cli
from managers import BUNDLE, Manager, job_spec, release_all
from s3_server import S3Server


@pytest.fixture(scope="module")
def manager(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """One that offers no VM: whoever asks for one leaves a trace in its log and its job's history."""
    # The server's credentials are in the environment that the manager starts with.
    allowed = (s3_server.endpoint, "http://127.0.0.1:9", "file:///")
    running = Manager(tmp_path_factory.mktemp("bad") / "home", *allowed).start()
    running.client.post("/providers/local/capacity", json={"vms": 0})
    yield running
    running.stop()
    release_all(running.home)


def stored(manager: Manager) -> dict[str, Any]:
    """All that a submission leaves: what the API lists, files of jobs and VMs, rows of the journal."""
    with closing(sqlite3.connect(manager.home / "journal.sqlite3")) as journal:
        tables = [name for (name,) in journal.execute("select name from sqlite_master where type = 'table'")]
        rows = {name: journal.execute(f'select count(*) from "{name}"').fetchone()[0] for name in tables}
    assert rows
    files = [path for folder in ("jobs", "vms", "scratch") for path in (manager.home / folder).rglob("*")]
    return {"jobs": manager.client.get("/jobs"), "files": sorted(files), "rows": rows}


# ---- code, checked on the user's machine -------------------------------------------------------------------


def test_sound_code_passes(tmp_path: Path) -> None:
    assert check(tmp_path, GOOD) == "ok"


@pytest.mark.parametrize("what", FAULTS)
def test_faulty_code_is_refused_with_the_call(tmp_path: Path, what: str) -> None:
    told = check(tmp_path, faulty(what))
    for said in FAULTS[what][2]:
        assert said in told


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("nothing:build", "entrypoint 'nothing:build': importing 'nothing': ModuleNotFoundError"),
        ("train:make", "entrypoint 'train:make': 'train' has no function 'make'"),
        ("train:GOOD", "'train' has no function 'GOOD'"),
    ],
)
def test_an_entrypoint_that_is_not_there_is_named(tmp_path: Path, entrypoint: str, said: str) -> None:
    assert said in check(tmp_path, GOOD, entrypoint)


def test_more_sections_than_the_model_has_are_refused(tmp_path: Path) -> None:
    assert "parallelism.num_sections: 99 is not in 1..3" in check(tmp_path, GOOD, num_sections=99)
    assert check(tmp_path, GOOD, num_sections=3) == "ok"


def test_more_stages_than_the_model_can_have_sections_are_refused(tmp_path: Path) -> None:
    said = "parallelism.pipeline_parallel_degree: 4 is more than the 3 sections that the model's graph allows"
    assert said in check(tmp_path, GOOD, pipeline_parallel_degree=4)
    assert check(tmp_path, GOOD, pipeline_parallel_degree=3) == "ok"
    said = "parallelism.pipeline_parallel_degree: 3 is more than num_sections (2); raise it"
    assert said in check(tmp_path, GOOD, pipeline_parallel_degree=3, num_sections=2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("the model branches on values", "train.py:12: if x.sum() > 0:"),
        ("the entrypoint raises", "RuntimeError: no data here"),
        ("the module exits", "train:build ended its process with status 3"),
    ],
)
def test_apply_ends_with_status_2_and_stores_nothing(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(faulty(what))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_spec(tmp_path / "store")))
    before = stored(manager)
    assert cli.main(["apply", "-f", str(tmp_path / "job.yaml"), "--home", str(manager.home)]) == 2
    assert said in capsys.readouterr().err
    assert stored(manager) == before
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour: red", "colour: unknown key"),
        ('workdir: "a\\0b"', "workdir: "),
        ('checkpoint: {uri: "a\\0b"}', "checkpoint.uri: "),
        ("checkpoint: {uri: 's3://[b/p'}", "checkpoint.uri: "),
        ("envs: &envs {A: *envs}", "not YAML: *envs stands inside of what it stands for"),
        ('envs: {A: "\\ud800"}', "not YAML: 'utf-8' codec can't encode character"),
    ],
)
def test_apply_refuses_a_faulty_file_before_any_code_runs(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('code was run')")
    spec = job_spec(tmp_path / "store")
    spec.pop(line.partition(":")[0], None)
    (tmp_path / "job.yaml").write_text(f"{yaml.safe_dump(spec)}{line}\n")
    assert cli.main(["apply", "-f", str(tmp_path / "job.yaml"), "--home", str(manager.home)]) == 2
    assert said in capsys.readouterr().err


# ---- specifications, checked by the manager ----------------------------------------------------------------


def refusal(response: httpx.Response) -> dict[str, str]:
    assert response.status_code == 422, response.text
    return {error["field"]: error["message"] for error in response.json()["errors"]}


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"training": {"colour": 1}}, "training.colour", "unknown key"),
        ({"training": {"steps": "20"}}, "training.steps", "integer"),
        ({"training": {"steps": True}}, "training.steps", "integer"),
        ({"training": {"steps": 10**400}}, "training.steps", "less than"),
        ({"training": {"seed": 2**63}}, "training.seed", "less than"),
        ({"training": {"global_batch_size": 10**30}}, "training.global_batch_size", "less than"),
        ({"resources": {"max_nodes": 10**9}}, "resources.max_nodes", "less than"),
        ({"resources": {"device_memory": "9" * 400 + "GB"}}, "resources.device_memory", "no size"),
        ({"checkpoint": {"interval": 10**400}}, "checkpoint.interval", "no interval"),
        ({"parallelism": {"microbatch_size": 3}}, "training.global_batch_size", "not divisible"),
        ({"resources": {"provider": "moon"}}, "resources.provider", "unknown provider 'moon'"),
        ({"resources": {"provider": ["local", 7]}}, "resources.provider", "a list of texts"),
        (
            {"resources": {"provider": "aws", "instance_type": "m5.large", "region": "us-east-1"}},
            "resources.provider",
            "has no provider aws; expected local, static",
        ),
        ({"envs": {"A": "x\0"}}, "envs.A", "NUL"),
        ({"envs": {"A=B": "x"}}, "envs", "no name of an environment variable"),
        ({"envs": {"A": "\ud800"}}, "job file", "surrogate"),
        ({"checkpoint": {"uri": "file:///proc/nowhere"}}, "checkpoint.uri", "/proc/nowhere"),
        ({"checkpoint": {"uri": "file:///tmp/a%00b"}}, "checkpoint.uri", "NUL"),
        ({"checkpoint": {"uri": "file:///tmp/" + "a" * 300}}, "checkpoint.uri", "too long"),
        ({"checkpoint": {"uri": "s3://[b/p"}}, "checkpoint.uri", "names no bucket"),
        ({"checkpoint": {"uri": "s3://b/p", "endpoint": "moon"}}, "checkpoint.endpoint", "no address"),
        (
            {"checkpoint": {"uri": "s3://b/p", "endpoint": "http://h:99999"}},
            "checkpoint.endpoint",
            "no address",
        ),
        ({"checkpoint": {"uri": "s3://b/p", "region": "x y"}}, "checkpoint.region", "no region"),
    ],
)
def test_a_faulty_specification_names_the_field_and_stores_nothing(
    manager: Manager, tmp_path: Path, changes: dict[str, Any], field: str, says: str
) -> None:
    before = stored(manager)
    found = refusal(manager.submit(tmp_path / "store", **changes))
    assert any(name.startswith(field) and says in message for name, message in found.items()), found
    assert stored(manager) == before
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("spec", ["[" * 10**5, '{"name":' * 10**5, "{}{}"])
def test_text_that_is_no_json_is_refused(manager: Manager, spec: str) -> None:
    before = stored(manager)
    assert "not JSON" in refusal(manager.post_job(spec))["spec"]
    assert stored(manager) == before


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_where_the_store_should_be_is_refused(manager: Manager, tmp_path: Path, below: str) -> None:
    (tmp_path / "store").write_text("precious")
    before = stored(manager)
    told = refusal(manager.submit(tmp_path / "store" / below))
    assert "File exists" in told["checkpoint.uri"]
    assert stored(manager) == before
    assert (tmp_path / "store").read_text() == "precious"


def test_a_bucket_that_is_not_there_is_refused(manager: Manager, tmp_path: Path, s3_server: S3Server) -> None:
    before = stored(manager)
    checkpoint = {"uri": "s3://not-there/p", "endpoint": s3_server.endpoint}
    assert "NoSuchBucket" in refusal(manager.submit(tmp_path, checkpoint=checkpoint))["checkpoint.uri"]
    assert stored(manager) == before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "nobody", "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_refused(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    manager = Manager(tmp_path / "home", s3_server.endpoint).start()
    try:
        before = stored(manager)
        checkpoint = {"uri": s3_server.uri("wrong"), "endpoint": s3_server.endpoint}
        assert said in refusal(manager.submit(tmp_path, checkpoint=checkpoint))["checkpoint.uri"]
        assert stored(manager) == before
    finally:
        manager.stop()


def test_a_store_that_does_not_answer_is_no_fault_of_the_specification(
    manager: Manager, tmp_path: Path
) -> None:
    before = stored(manager)
    answer = manager.submit(tmp_path, checkpoint={"uri": "s3://b/p", "endpoint": "http://127.0.0.1:9"})
    assert answer.status_code == 503
    assert "checkpoint.uri" in answer.json()["detail"]
    assert stored(manager) == before


def torn(how: str) -> bytes:
    """A bundle that came to harm."""
    if how == "cut short":
        return BUNDLE[: len(BUNDLE) // 2]
    if how == "without its checksum":
        return BUNDLE[:-8]
    if how == "with another checksum":
        return BUNDLE[:-8] + bytes(4) + BUNDLE[-4:]
    if how == "not packed":
        return gzip.decompress(BUNDLE)
    if how == "packed nonsense":
        return gzip.compress(b"nonsense" * 200)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        entry = tarfile.TarInfo("innocent")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    return raw.getvalue()


@pytest.mark.parametrize(
    "how",
    [
        "cut short",
        "without its checksum",
        "with another checksum",
        "not packed",
        "packed nonsense",
        "with a link out of it",
    ],
)
def test_a_malformed_bundle_is_refused(manager: Manager, tmp_path: Path, how: str) -> None:
    before = stored(manager)
    response = manager.post_job(json.dumps(job_spec(tmp_path / "store")), bundle=torn(how))
    assert list(refusal(response)) == ["bundle"]
    assert stored(manager) == before
    assert not (tmp_path / "store").exists()
