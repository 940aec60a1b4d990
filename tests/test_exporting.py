"""`makara export`: the weights of any published checkpoint of a job that runs or has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
from makara.checkpoint import CheckpointId, export, open_store, weights_sha256
from makara.manager.cli import main
from makara.manager.client import Refused
from managers import Manager, release_all


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
    assert f"there is no {job}/head.json" in capsys.readouterr().err
    store = open_store((tmp_path / "store").as_uri())
    monkeypatch.setattr(checkpoints, "JOB", job)
    checkpoints.published(store, 10, 1)
    newest = checkpoints.published(store, 20, 2)
    for step, options in ((20, []), (10, ["--step", "10"]), (10, ["--step", "10"])):
        assert main(["export", job, *options, *login]) == 0
        made = tmp_path / "store" / job / "export" / str(step) / "model.safetensors"
        shown = capsys.readouterr().out.split()
        assert shown == ["step", str(step), "weights", made.as_uri(), "weight", "hash", weights_sha256(made)]
    assert export(store, job, CheckpointId(20, 2)).sha256 == weights_sha256(
        tmp_path / "store" / job / "export" / "20" / "model.safetensors"
    )
    with pytest.raises(Refused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={"step": 15})
    ((field, message),) = refused.value.errors
    assert field == "step"
    assert "has not a checkpoint of step 15: those of steps 10, 20 are published" in message
    (tmp_path / "store" / newest.parts[0].key).write_bytes(b"torn")
    assert manager.client.post(f"/jobs/{job}/export", json={})["step"] == 20  # it was exported before
    with pytest.raises(Refused) as refused:
        manager.client.post(f"/jobs/{job}/export", json={"secrets": {"OTHER": "x"}})
    assert refused.value.errors == [("secrets", "OTHER is no key of a store")]
