"""`makara export`: the weights of any published checkpoint of a job that runs or has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from azurite_server import AzuriteServer
from conftest import StoreAddress
from core_script import RECIPE
from makara.checkpoint import CREDENTIALS, export, open_store, weights_sha256
from makara.checkpoint.layout import head_key
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.main import main
from makara.protocol.messages import CheckpointRef
from managers import Manager, job_spec, release_all
from s3_server import S3Server


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(tmp_path / "home").start()
    running.client.post("/providers/local/capacity", json={"vms": 0})  # what is stored is enough
    yield running
    running.stop()
    release_all(running.home)


@pytest.mark.parametrize("ended", [False, True])
def test_any_published_checkpoint_is_exported_while_a_job_runs_and_after_its_end(
    manager: Manager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: bool,
) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    if ended:
        manager.client.post(f"/jobs/{job}/stop")
    login = ["--server", manager.url, "--token", manager.token]
    assert main(["export", job, *login]) == 2
    assert f"has no checkpoint of job {job}" in capsys.readouterr().err
    store = open_store((tmp_path / "store").as_uri())
    monkeypatch.setattr(checkpoints, "JOB", job)
    checkpoints.published(store, 10, 1)
    newest = checkpoints.published(store, 20, 2)
    for step, options in ((20, []), (10, ["--step", "10"]), (10, ["--step", "10"])):
        assert main(["export", job, *options, *login]) == 0
        made = tmp_path / "store" / job / "export" / str(step) / "model.safetensors"
        shown = capsys.readouterr().out.split()
        assert shown == ["step", str(step), "weights", made.as_uri(), "weight", "hash", weights_sha256(made)]
    assert export(store, job, CheckpointRef(step=20, generation=2)).sha256 == weights_sha256(
        tmp_path / "store" / job / "export" / "20" / "model.safetensors"
    )
    with pytest.raises(RequestRefused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={"step": 15})
    ((field, message),) = refused.value.errors
    assert field == "step"
    assert "has no checkpoint of step 15: those of steps 10, 20 are published" in message
    (tmp_path / "store" / newest.parts[0].key).write_bytes(b"torn")
    assert manager.client.post(f"/jobs/{job}/export", json={})["step"] == 20  # it was exported before
    damaged = checkpoints.published(store, 30, 3).parts[0].key
    (tmp_path / "store" / damaged).write_bytes(b"torn")
    with pytest.raises(RequestRefused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={})
    ((field, message),) = refused.value.errors
    assert field == "step"
    assert message.startswith(f"the checkpoint of step 30 is damaged: {damaged} in {store.uri}: ")
    assert message.endswith("; --step exports another: 20, 10")
    (tmp_path / "store" / head_key(job)).write_bytes(b"torn")
    with pytest.raises(RequestRefused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={})
    ((field, message),) = refused.value.errors
    assert field == "step"
    assert message.startswith(f"the checkpoints of job {job} in {store.uri} are not known: {head_key(job)}")
    with pytest.raises(RequestRefused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={"secrets": {"OTHER": "x"}})
    assert refused.value.errors == [("secrets", "OTHER is no key of a store")]


@pytest.mark.parametrize(
    ("kind", "secret"), [("s3_server", "AWS_SECRET_ACCESS_KEY"), ("azurite", "AZURE_STORAGE_KEY")]
)
def test_a_job_with_keys_of_its_own_is_resumed_started_from_and_exported(
    manager: Manager,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    secret: str,
) -> None:
    server: S3Server | AzuriteServer = request.getfixturevalue(kind)
    address = StoreAddress(server.uri("exporting"), server.endpoint)
    keys = {name: server.environment[name] for name in CREDENTIALS if name in server.environment}
    login = ["--server", manager.url, "--token", manager.token]

    def submit(**checkpoint: str) -> str:
        place = {"uri": address.uri, "endpoint": address.endpoint}
        value = job_spec(tmp_path, checkpoint={**place, **checkpoint}, training={"global_batch_size": 8})
        answer = manager.post_job(json.dumps({**value, "secrets": list(keys)}), secrets=json.dumps(keys))
        assert answer.status_code == 201, answer.text
        return answer.json()["job"]

    job = submit()
    monkeypatch.setattr(checkpoints, "JOB", job)
    recipe = RECIPE.model_copy(update={"cuts": [1, 2]}).model_dump(mode="json")
    checkpoints.published(address.open(), 10, 1, recipe)
    manager.client.post(f"/jobs/{job}/stop")
    target = tmp_path / "made" / "weights.safetensors"
    assert main(["export", job, "--to", str(target), *login]) == 0
    shown = capsys.readouterr().out
    assert f"weight hash  {weights_sha256(target)}" in shown
    assert f"copied to    {target}" in shown
    assert main(["export", job, "--to", str(tmp_path / "folder"), *login]) == 0
    assert weights_sha256(tmp_path / "folder") == weights_sha256(target)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.safetensors"]
    monkeypatch.setenv(secret, "d3Jvbmc=")
    assert main(["export", job, "--to", str(target), *login]) == 2
    monkeypatch.setenv(secret, keys[secret])
    assert main(["resume", job, *login]) == 0
    assert manager.client.get(f"/jobs/{job}")["status"] == "pending"
    copy = submit(start_from=job)
    view = manager.wait(copy, lambda v: bool(v["checkpoints"]))
    assert view["checkpoints"] == [{"step": 10, "generation": 0}]
    assert main(["export", copy, "--to", str(target), *login]) == 0
    assert weights_sha256(target) == weights_sha256(tmp_path / "folder"), "the copy has the same weights"
