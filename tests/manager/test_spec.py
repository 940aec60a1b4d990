"""The job file: what is accepted, and how each fault is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from makara.checkpoint import StoreUri
from makara.manager.spec.job_file import read_job, read_spec
from makara.manager.spec.job_spec import (
    JobSpec,
    JobSpecError,
    parse_spec,
    parse_yaml,
    resolve_uri,
    to_settings,
)
from makara.manager.spec.other_tools import _TABLE, _paths, belongs
from makara.manager.spec.start_source import split_step
from makara.manager.spec.store_uri import uri_faults
from makara.worker import Training

JOB = """\
name: gpt
workdir: .
entrypoint: train:build
resources: {provider: local, min_nodes: 1, max_nodes: 6, device_memory: 200MB}
training: {global_batch_size: 64, steps: 200, seed: 7, numerics: exact}
parallelism: auto
checkpoint: {uri: ./checkpoints, interval: 10, keep_latest_k: 3}
"""


def test_the_job_file_of_the_manual_is_accepted() -> None:
    spec = parse_yaml(JOB)
    assert spec.resources.device_memory == 200_000_000
    assert spec.parallelism.pipeline_parallel_degree is None
    assert spec.checkpoint.interval_steps == 10
    assert spec.checkpoint.interval_s is None
    assert spec.retry.max_restarts_on_errors == 0


ACCOUNT = "https://a01.blob.core.windows.net"


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ('"on"', "on"), ("auto", "auto")])
@pytest.mark.parametrize("name", ["recompute", "halves", "optimizer_offload"])
def test_what_the_planner_may_decide_is_on_off_or_auto(name: str, text: str, value: str) -> None:
    spec = parse_yaml(JOB.replace("parallelism: auto", f"parallelism: {{{name}: {text}}}"))
    assert getattr(spec.parallelism, name) == value
    assert parse_spec(spec.model_dump(mode="json")) == spec
    with pytest.raises(JobSpecError, match=rf"parallelism\.{name}"):
        parse_yaml(JOB.replace("parallelism: auto", f"parallelism: {{{name}: maybe}}"))


def test_a_spec_survives_the_journal() -> None:
    spec = parse_yaml(JOB.replace("interval: 10", "interval: 10m"))
    assert parse_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("10", 10, None), ('"10"', 10, None), ("90s", None, 90.0), ("1.5h", None, 5400.0)],
)
def test_an_interval_counts_steps_unless_it_has_a_unit(
    text: str, steps: int | None, seconds: float | None
) -> None:
    checkpoint = parse_yaml(JOB.replace("interval: 10", f"interval: {text}")).checkpoint
    assert (checkpoint.interval_steps, checkpoint.interval_s) == (steps, seconds)


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ("steps", "stepz", "training.stepz", "did you mean steps? (accepted here: global_batch_size, steps"),
        ("name: gpt", "naem: gpt", "naem", "did you mean name?"),
        (
            "max_nodes: 6",
            "max_nodes: '6'",
            "resources.max_nodes",
            "expected a valid integer, got '6'; write 6, without quotes",
        ),
        ("max_nodes: 6", "max_nodes: 5e1", "resources.max_nodes", "got '5e1'; write 50, without quotes"),
        ("max_nodes: 6", "max_nodes: true", "resources.max_nodes", "integer"),
        (
            "seed: 7",
            "seed: 7}\nenvs: {THREADS: 8",
            "envs.THREADS",
            'got 8; text that looks like something else is written in quotes: "8"',
        ),
        ("seed: 7", "seed: 7}\nenvs: {A B: x", "envs.A B", "'A B' is no name of an environment variable"),
        ("seed: 7", "seed: 7}\nsecrets: [A, 2]\nenvs: {A: x", "secrets[1]", "expected a valid string, got 2"),
        ("train:build", "./src/train.py:build", "entrypoint", "as Python imports it: src.train:build"),
        ("train:build", "train.py:build", "entrypoint", "'train.py:build' names a file; expected the module"),
        ("seed: 7", "seed: 7.5", "training.seed", "integer"),
        ("local", "gcp", "resources.provider", "unknown provider 'gcp'; expected local, static, aws, azure"),
        ("max_nodes: 6", "max_nodes: 6, region: eu", "resources.region", "no meaning with provider local"),
        ("min_nodes: 1", "min_nodes: 7", "resources.min_nodes", "7 is more than resources.max_nodes (6)"),
        ("200MB", "200XB", "resources.device_memory", "expected a number with a unit of B, KB, MB"),
        (
            "interval: 10",
            "interval: 10y",
            "checkpoint.interval",
            "expected steps (10) or a time (90s, 10m, 2h)",
        ),
        ("interval: 10", "interval: 0", "checkpoint.interval", "0 is no interval"),
        (
            "./checkpoints",
            "gs://b/p",
            "checkpoint.uri",
            "expected a path, file:///path, s3://bucket/prefix or az://container/prefix",
        ),
        ("./checkpoints", "file://host/p", "checkpoint.uri", "expected file:///absolute/path"),
        ("interval: 10", "endpoint: http://h", "checkpoint.endpoint", "no meaning with a folder"),
        (
            "./checkpoints",
            "az://container/p",
            "checkpoint.endpoint",
            "is required with az://: the account, https",
        ),
        ("./checkpoints", f"az://Box/p, endpoint: '{ACCOUNT}'", "checkpoint.uri", "names no container"),
        (
            "./checkpoints",
            f"az://box/../p, endpoint: '{ACCOUNT}'",
            "checkpoint.uri",
            "expected az://container/a/b",
        ),
        (
            "./checkpoints",
            f"az://box/p, endpoint: '{ACCOUNT}', region: eu",
            "checkpoint.region",
            "s3:// uri only",
        ),
        ("./checkpoints", f"az://box/p, endpoint: '{ACCOUNT}/box'", "checkpoint.endpoint", "is no account"),
        (
            "./checkpoints",
            "az://box/p, endpoint: 'http://127.0.0.1:1'",
            "checkpoint.endpoint",
            "is no account",
        ),
        (
            "./checkpoints",
            f"az://box/p, endpoint: '{ACCOUNT}?sv=1&sig=x'",
            "checkpoint.endpoint",
            f"'{ACCOUNT}' is no account",
        ),
        (
            "interval: 10",
            "start_from: 'az://box/p/gpt'",
            "checkpoint.start_from",
            "if its own checkpoints are there, in the same account",
        ),
        (
            "train:build",
            "train",
            "entrypoint",
            "expected module:function, for example train:build, got 'train'",
        ),
        ("name: gpt", "name: My Job", "name", "lower-case letters"),
        ("seed: 7", "precision: int8", "training.precision", "'fp32', 'bf16' or 'fp16'"),
        ("numerics: exact", "numerics: exakt", "training.numerics", "'exact' or 'fast'"),
        (
            "auto",
            "{microbatch_size: 7}",
            "training.global_batch_size",
            "not divisible by parallelism.microbatch_size",
        ),
        ("auto", "{data_parallel_degree: 7}", "parallelism", "P·D = 7 workers"),
        (
            "auto",
            "{pipeline_parallel_degree: 0}",
            "parallelism.pipeline_parallel_degree",
            "greater than or equal to 1",
        ),
        (
            "auto",
            "{microbatch_size: 32, data_parallel_degree: 3}",
            "parallelism.data_parallel_degree",
            "3 is more than the 2 micro-batches",
        ),
        (
            "auto",
            "{pipeline_parallel_degree: 4, num_sections: 3}",
            "parallelism.pipeline_parallel_degree",
            "4 is more than parallelism.num_sections (3)",
        ),
        ("workdir: .", "envs: {A: 3}", "envs.A", "valid string"),
        ("entrypoint: train:build\n", "", "entrypoint", "is required"),
    ],
)
def test_each_fault_names_its_field_and_what_would_be_accepted(
    old: str, new: str, field: str, message: str
) -> None:
    assert old in JOB
    with pytest.raises(JobSpecError) as caught:
        parse_yaml(JOB.replace(old, new, 1))
    told = dict(caught.value.errors)
    assert field in told
    assert message in told[field]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://key:pass@b/p", "names a user and a password before an @; leave them out"),
        ("az://box@a01.blob.core.windows.net/p", "names a user before an @; leave them out"),
        ("s3://b#x/p", "names no bucket"),
        ("s3://b?x/p", "names no bucket"),
        ("s3://b\n/p", "a line break or another control character"),
        ("s3://b/p\n", "a line break or another control character"),
        ("s3:/b/p", "lacks slashes after 's3:'; expected file:///path, s3://bucket/prefix"),
        ("file:/p", "lacks slashes after 'file:'"),
        ("az:box/p", "lacks slashes after 'az:'"),
        ("file:///~/p", "~ means nothing in a URI; write the path alone, '~/p'"),
        ("file:///%7Ejo/p", "~ means nothing in a URI; write the path alone, '~jo/p'"),
        ("$HOME/p", "variables are not expanded in a job file"),
        ("${SCRATCH}/p", "variables are not expanded in a job file"),
        ("az://box/a\\b", "Azure changes such names"),
        ("az://box/a./b", "Azure changes such names"),
    ],
)
def test_a_uri_that_would_open_another_place_than_it_names_is_refused(uri: str, message: str) -> None:
    endpoint = ACCOUNT if uri.startswith("az://") else None
    told = dict(uri_faults(uri, endpoint, None))
    assert message in told["checkpoint.uri"]
    assert "pass@" not in told["checkpoint.uri"]


@pytest.mark.parametrize("endpoint", ["http://h?x", "http://h#x", "http://key:pass@h", "https://h?"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    told = dict(uri_faults("s3://b/p", endpoint, None))
    assert "expected http(s)://host[:port]" in told["checkpoint.endpoint"]
    assert "pass" not in told["checkpoint.endpoint"]


@pytest.mark.parametrize("name", ["a#b", "a?b=c", "a b", "a%20b", "a;b", "ü", "a~", "a$b"])
def test_names_of_folders_and_prefixes_may_contain_what_is_special_in_other_uris(
    name: str, tmp_path: Path
) -> None:
    assert not uri_faults(f"s3://b/{name}/c", None, None)
    spec = parse_yaml(JOB.replace("./checkpoints", f"'./{name}/c', start_from: './{name}/d@7'"))
    resolved = resolve_uri(spec, tmp_path).checkpoint
    assert StoreUri.of(resolved.uri).folder == tmp_path / name / "c"
    assert resolved.start_from is not None
    place, step = split_step(resolved.start_from)
    assert (StoreUri.of(place).folder, step) == (tmp_path / name / "d", 7)


def test_a_path_in_a_job_file_may_begin_in_the_home_of_the_user_who_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/code").mkdir(parents=True)
    text = JOB.replace("./checkpoints", "~/c, start_from: ~/d/gpt-1@5").replace(
        "workdir: .", "workdir: ~/code"
    )
    (tmp_path / "job.yaml").write_text(text)
    spec, workdir = read_job(tmp_path / "job.yaml")
    assert workdir == tmp_path / "home/code"
    assert spec.checkpoint.uri == (tmp_path / "home/c").as_uri()
    assert spec.checkpoint.start_from == (tmp_path / "home/d/gpt-1").as_uri() + "@5"

    (tmp_path / "job.yaml").write_text(text.replace("~/", "./~/"))
    assert read_spec(tmp_path / "job.yaml").checkpoint.uri == (tmp_path / "~/c").as_uri()

    with pytest.raises(JobSpecError, match="is relative"):  # as a manager would: its home is another
        to_settings(parse_yaml(text), "gpt-1", "0" * 64)


@pytest.mark.parametrize("field", ["workdir", "checkpoint.uri", "checkpoint.start_from"])
def test_the_home_of_an_unknown_user_is_refused(field: str, tmp_path: Path) -> None:
    path = "~no-such-user/x"
    text = {
        "workdir": JOB.replace("workdir: .", f"workdir: {path}"),
        "checkpoint.uri": JOB.replace("./checkpoints", path),
        "checkpoint.start_from": JOB.replace("interval: 10", f"start_from: {path}"),
    }[field]
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(JobSpecError) as caught:
        read_job(tmp_path / "job.yaml")
    assert "the home folder ~no-such-user is not known on this machine" in dict(caught.value.errors)[field]


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        (
            "name: gpt",
            "name: gpt\naccelerators: A100:8",
            "accelerators",
            "resources.instance_type says which",
        ),
        (
            "name: gpt",
            "name: gpt\nnum_nodes: 4",
            "num_nodes",
            "resources.max_nodes (and resources.min_nodes)",
        ),
        ("name: gpt", "name: gpt\nrun: python train.py", "run", "`entrypoint` names a function that returns"),
        ("name: gpt", "name: gpt\nmax_nodes: 4", "max_nodes", "did you mean resources.max_nodes?"),
        ("name: gpt", "name: gpt\nenv: {A: x}", "env", "that belongs in envs"),
        (
            "seed: 7",
            "learning_rate: 0.1",
            "training.learning_rate",
            "that belongs in the code: Training.optim",
        ),
        ("seed: 7", "num-train-epochs: 3", "training.num-train-epochs", "that belongs in training.steps"),
        ("seed: 7", "bf16: true", "training.bf16", "that belongs in training.precision"),
        (
            "seed: 7",
            "gradientAccumulationSteps: 3",
            "training.gradientAccumulationSteps",
            "leave it out: it fol",
        ),
        ("seed: 7", "interval: 3", "training.interval", "did you mean checkpoint.interval?"),
        ("min_nodes: 1", "nproc_per_node: 1", "resources.nproc_per_node", "resources.workers_per_node"),
        ("min_nodes: 1", "use-spot: true", "resources.use-spot", "did you mean use_spot?"),
        ("keep_latest_k: 3", "output_dir: x", "checkpoint.output_dir", "that belongs in checkpoint.uri"),
        (
            "train:build",
            "python train.py --lr 1",
            "entrypoint",
            "is a command, and none is run; expected module:",
        ),
        (
            "train:build",
            "torchrun --nproc-per-node 2 src/pretrain.py",
            "entrypoint",
            "expected module:function, as pretrain:build",
        ),
        ("train:build", "train.py", "entrypoint", "expected the module as Python imports it: train:build"),
    ],
)
def test_a_key_of_another_tool_or_another_section_is_told_where_it_belongs(
    old: str, new: str, field: str, message: str
) -> None:
    assert old in JOB
    with pytest.raises(JobSpecError) as caught:
        parse_yaml(JOB.replace(old, new, 1))
    assert message in dict(caught.value.errors)[field]


def test_every_key_that_is_named_to_users_of_other_tools_exists() -> None:
    own = {*_paths(JobSpec, "")}
    for where in _TABLE.values():
        for path in re.findall(r"(?:resources|training|parallelism|checkpoint|retry)\.\w+", where):
            assert path in own
        for name in re.findall(r"Training\.(\w+)", where):
            assert name in Training.__annotations__
    for key in own:
        assert belongs(key.rpartition(".")[2], JobSpec) not in _TABLE.values()


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(JobSpecError) as caught:
        parse_yaml(
            JOB.replace("local", "gcp")
            .replace("min_nodes: 1", "min_nodes: 9")
            .replace("auto", "{microbatch_size: 7}")
        )
    assert {field for field, _ in caught.value.errors} == {
        "resources.provider",
        "resources.min_nodes",
        "training.global_batch_size",
    }


@pytest.mark.parametrize("text", ["a: [", "3", "", "- a\n- b\n", "a: b: c"])
def test_what_is_no_mapping_is_told_so(text: str) -> None:
    with pytest.raises(JobSpecError, match="job file"):
        parse_yaml(text)


def test_a_fault_deep_in_the_file_has_its_line() -> None:
    text = JOB.replace(
        "checkpoint: {uri: ./checkpoints, interval: 10", "checkpoint:\n  uri: c\n  interval: no\n  x: {"
    )
    with pytest.raises(JobSpecError):
        parse_yaml(text)
    text = "name: gpt\nentrypoint: a:b\nresources:\n  provider: local\n  max_nodes: none\n"
    with pytest.raises(JobSpecError) as caught:
        parse_yaml(text)
    lines = dict(zip(dict(caught.value.errors), caught.value.lines, strict=True))
    assert lines["resources.max_nodes"] == 5
    assert "resources.max_nodes: expected a valid integer, got 'none' (line 5)" in str(caught.value)


def test_settings_need_an_absolute_uri() -> None:
    spec = parse_yaml(JOB)
    with pytest.raises(JobSpecError, match="relative"):
        to_settings(spec, "j1", "ab")
    settings = to_settings(resolve_uri(spec, Path("/data")), "j1", "ab")
    assert settings.store.uri == "file:///data/checkpoints"
    assert (settings.job, settings.steps, settings.numerics) == ("j1", 200, "exact")
    assert settings.checkpoint_interval_steps == 10


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_reaches_the_trainers(precision: str) -> None:
    text = JOB.replace("seed: 7", f"seed: 7, precision: {precision}")
    settings = to_settings(resolve_uri(parse_yaml(text), Path("/data")), "j1", "ab")
    assert settings.precision == precision


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"resources": {"max_nodes": 2}}, "that needs at least 3 VMs, and resources.max_nodes is 2"),
        ({"parallelism": {"data_parallel_degree": 2}}, "parallelism.data_parallel_degree is 2"),
        ({"training": {"global_batch_size": 2}}, "a step has 2 micro-batches"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "that needs at least 6 VMs"),
    ],
)
def test_copies_that_can_never_be_had_are_refused(change: dict[str, dict[str, int]], why: str) -> None:
    value = {
        "name": "copies",
        "entrypoint": "train:build",
        "resources": {"provider": "local", "min_nodes": 1, "max_nodes": 5},
        "training": {"global_batch_size": 8, "steps": 3},
        "parallelism": {},
        "checkpoint": {"uri": "file:///tmp/x"},
        "resilience": {"tolerated_failures": 2},
    }
    assert parse_spec(value).resilience.tolerated_failures == 2
    for part, fields in change.items():
        value[part] = {**value[part], **fields}  # pyright: ignore
    with pytest.raises(JobSpecError) as refused:
        parse_spec(value)
    assert f"resilience.tolerated_failures: 2 asks for 3 copies of each section; {why}" in str(refused.value)


def test_an_unknown_key_of_resilience_is_an_error() -> None:
    with pytest.raises(JobSpecError, match=r"resilience\.tolerated"):
        parse_spec({"name": "x", "entrypoint": "a:b", "resilience": {"tolerated": 1}})
