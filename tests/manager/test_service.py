"""The manager at work, with real VMs of scripted agents: what it was told once it never forgets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.main import main
from makara.manager.service.journal import SqliteJournal
from makara.simulator import Measurements
from managers import Manager, release_all
from scripted_agent import END_WAITS_FOR


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(tmp_path / "home").start()
    yield running
    running.stop()
    release_all(running.home)


def live(view: dict) -> list[str]:
    return [vm["vm"] for vm in view["vms"] if vm["status"] == "joined"]


def test_a_job_trains_exports_and_leaves_no_vm(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    view = manager.wait(job, lambda v: v["status"] == "finished")
    assert view["step"] == 20
    assert Path(view["export_uri"].removeprefix("file://")).is_file()
    assert all(vm["status"] == "ended" for vm in view["vms"])
    losses = manager.client.get(f"/jobs/{job}/metrics")["metrics"]
    assert losses[-1]["step"] == 20
    assert losses[-1]["grad_norm"] is None  # what is no number is null in JSON
    journal_facts = manager.client.get(f"/jobs/{job}/events")["events"]
    assert [entry["sequence"] for entry in journal_facts] == list(range(1, len(journal_facts) + 1))
    assert any(entry["fact"]["fact"] == "job_ended" for entry in journal_facts)


def test_what_was_measured_is_left_in_the_store_for_other_jobs(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    manager.wait(job, lambda v: v["status"] == "finished")
    (path,) = (tmp_path / "store" / "calibrations").iterdir()
    found = Measurements.from_json(path.read_text())
    assert found.basis is not None
    assert path.name == f"{found.basis.fingerprint}.json"
    facts = [entry["fact"] for entry in manager.client.get(f"/jobs/{job}/events")["events"]]
    fixed = next(fact for fact in facts if fact["fact"] == "recipe_fixed")
    assert (fixed["measurements"], fixed["stored"]) == (found.to_json(), False)


def test_a_manager_killed_mid_run_goes_on_where_it_stood(manager: Manager, tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    changes = {"training": {"steps": 60}, "envs": {END_WAITS_FOR: str(may_end)}}
    job = manager.submit(tmp_path / "store", **changes).json()["job"]
    before = manager.wait(job, lambda v: v["step"] > 3 and len(live(v)) == 2)
    url = manager.url
    manager.kill()
    leaders = [json.loads(path.read_text())["pid"] for path in manager.home.glob("vms/*/vm.json")]
    assert all(psutil.pid_exists(pid) for pid in leaders)  # training goes on
    manager.start()
    assert manager.url == url  # agents find their way back
    may_end.touch()
    after = manager.wait(job, lambda v: v["step"] > before["step"])
    assert set(live(before)) <= {vm["vm"] for vm in after["vms"]}
    assert len(after["morphs"]) >= len(before["morphs"])
    done = manager.wait(job, lambda v: v["status"] == "finished")
    assert len(done["vms"]) == 2  # the same VMs to the end: the restart cost none


def test_a_vm_that_dies_while_the_manager_is_away_is_replaced(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store", training={"steps": 100000}).json()["job"]
    view = manager.wait(job, lambda v: v["status"] == "running" and len(live(v)) == 2)
    manager.kill()
    victim = live(view)[0]
    psutil.Process(json.loads((manager.home / "vms" / victim / "vm.json").read_text())["pid"]).kill()
    manager.start()
    view = manager.wait(job, lambda v: len(v["vms"]) == 3 and v["status"] == "running")
    assert next(vm for vm in view["vms"] if vm["vm"] == victim)["reason"] == "preempted"


def test_a_killed_vm_is_noticed_and_the_job_stops_in_order(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store", training={"steps": 100000}).json()["job"]
    view = manager.wait(job, lambda v: v["status"] == "running")
    victim = live(view)[0]
    manager.client.post(f"/vms/{victim}/fault", json={"kind": "kill"})
    manager.wait(job, lambda v: len(v["vms"]) == 3 and v["status"] == "running")
    manager.client.post(f"/jobs/{job}/stop")
    view = manager.wait(job, lambda v: v["status"] == "stopped")
    assert view["checkpoints"]
    assert view["reason"]


def test_without_capacity_a_vm_is_waited_for(manager: Manager, tmp_path: Path) -> None:
    manager.client.post("/providers/local/capacity", json={"vms": 1})
    job = manager.submit(tmp_path / "store", training={"steps": 100000}).json()["job"]
    view = manager.wait(job, lambda v: v["status"] == "running")
    assert len(live(view)) == 1
    assert "no local VM" in view["trouble"][0]
    manager.client.post("/providers/local/capacity", json={"vms": 2})
    manager.wait(job, lambda v: len(live(v)) == 2)


def test_commands_are_done_once_the_job_is(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    manager.wait(job, lambda v: v["status"] == "finished")
    manager.stop()
    for seconds in (0, 1, 2, 4, 8, 16):  # on a busy machine, a release may be left to the next manager
        if "release_vm" in pending_commands(manager):
            manager.start()
            time.sleep(seconds)
            manager.stop()
    assert pending_commands(manager) == ["sweep_store"], "a minute after the end"


def pending_commands(manager: Manager) -> list[str]:
    """What the stopped manager's journal still wants done."""
    journal = SqliteJournal(manager.home / "journal.sqlite3")
    try:
        return [pending.command.command for pending in journal.pending_commands()]
    finally:
        journal.close()


def test_a_manager_of_a_new_home_asks_before_it_goes_on_from_an_earlier_head(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    job = manager.submit(store, key="the same").json()["job"]
    trained = manager.wait(job, lambda v: v["status"] == "finished")
    manager.stop()
    other = Manager(tmp_path / "other").start()
    try:
        assert other.submit(store, key="the same").json()["job"] == job
        view = other.wait(job, lambda v: v["status"] == "waiting")
        assert "head.json" in view["reason"]
        assert view["waiting"]["offers"] == ["again", "from_head", "restart"]
        scraped = other.http.get("/metrics", headers={"Authorization": f"Bearer {other.token}"}).text
        assert f'makara_waiting{{job="{job}"}} 1' in scraped
        login = ["--server", other.url, "--token", other.token]
        assert main(["status", job, *login]) == 0
        shown = capsys.readouterr().out
        assert f"makara resume {job} --from-head" in shown
        assert "its VMs are kept until" in shown
        assert main(["resume", job, "--from-head", *login]) == 0
        view = other.wait(job, lambda v: v["status"] == "finished")
        assert view["export_sha256"] == trained["export_sha256"]
        why = f"^job {job} is finished: it trained all 20 steps, and nothing is left to do$"
        with pytest.raises(RequestRefused, match=why):
            other.client.post(f"/jobs/{job}/resume", json={"how": "again"})
    finally:
        other.stop()
        release_all(other.home)


@pytest.mark.parametrize("kill", [False, True])
def test_a_stopped_job_goes_on_and_other_jobs_are_refused_in_words(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str], kill: bool
) -> None:
    manager.client.post("/providers/local/capacity", json={"vms": 0})
    job = manager.submit(tmp_path / "store").json()["job"]
    with pytest.raises(
        RequestRefused, match="only a job that waits for you, or that was stopped or failed, can"
    ):
        manager.client.post(f"/jobs/{job}/resume", json={})
    manager.client.post(f"/jobs/{job}/stop")
    stopped = manager.wait(job, lambda v: v["status"] == "stopped")
    if kill:
        manager.kill()
        manager.start()
        manager.client.post("/providers/local/capacity", json={"vms": 0})
    with pytest.raises(RequestRefused, match="the job has faults") as refused:
        manager.client.post(f"/jobs/{job}/resume", json={"max_nodes": 1, "min_nodes": 2})
    assert refused.value.errors == [("resources.min_nodes", "2 is more than resources.max_nodes (1)")]
    with pytest.raises(RequestRefused, match="does not wait for you: it goes on from its newest checkpoint"):
        manager.client.post(f"/jobs/{job}/resume", json={"how": "restart"})
    login = ["--server", manager.url, "--token", manager.token]
    assert main(["resume", job, "--max-nodes", "3", *login]) == 0
    assert f"{job} goes on from step 0 of 20 with up to 3 VMs" in capsys.readouterr().out
    view = manager.wait(job, lambda v: v["num_live_vms"] == 3)
    live_vms = {vm["vm"] for vm in view["vms"] if vm["status"] != "ended"}
    assert not live_vms & {vm["vm"] for vm in stopped["vms"]}
    again = manager.client.post(f"/jobs/{job}/resume", json={"max_nodes": 3})  # its answer was lost
    assert (again["job"], again["max_nodes"]) == (job, 3)
    with pytest.raises(
        RequestRefused, match="only a job that waits for you, or that was stopped or failed, can"
    ):
        manager.client.post(f"/jobs/{job}/resume", json={"max_nodes": 2})
    assert main(["events", job, *login]) == 0
    assert "job_continued min_nodes=1 max_nodes=3" in capsys.readouterr().out


def test_two_managers_cannot_share_a_home(manager: Manager) -> None:
    other = Manager(manager.home)
    with pytest.raises(AssertionError, match="another manager"):
        other.start()
    assert other.process is not None
    assert other.process.wait() != 0


def test_the_plan_that_runs_is_shown_among_what_else_there_was(manager: Manager, tmp_path: Path) -> None:
    manager.client.post("/providers/local/capacity", json={"vms": 0})
    changes = {"training": {"steps": 10**6}, "resources": {"min_nodes": 2}}
    job = manager.submit(tmp_path / "store", **changes).json()["job"]
    with pytest.raises(RequestRefused, match="runs no plan"):
        manager.client.get(f"/jobs/{job}/plan")
    manager.client.post("/providers/local/capacity", json={"vms": None})
    view = manager.wait(job, lambda view: view["seconds_per_step"])
    shown = manager.client.get(f"/jobs/{job}/plan")
    assert (shown["shape"], shown["generation"]) == (view["shape"], view["generation"])
    assert shown["predicted_s"] == view["predicted_s"]
    assert shown["measured_s"] > 0
    first = shown["rows"][0]
    assert first["running"]
    assert first["shape"] == view["shape"]
    assert first["predicted_s"] == pytest.approx(view["predicted_s"])
    assert first["workers_used"] + first["workers_idle"] == shown["workers"] == 2
    assert shown["why"].startswith(first["shape"])
    assert shown["after_a_death"].startswith("If a VM dies, ")
    assert manager.client.get(f"/jobs/{job}/plan")["rows"] == shown["rows"]
