"""What a VM fetches before it has an agent."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from makara.manager.boot import first_boot
from makara.manager.boot.payload import constraints, payload, torch_version, wheel
from makara.manager.service.tokens import Scope, TokenStore
from managers import Manager, release_all


def test_the_wheel_is_the_same_bytes_in_another_process() -> None:
    program = "from makara.manager.boot.payload import payload; print(payload().to_json())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == payload().to_json()
    assert payload().wheel_sha256 == hashlib.sha256(wheel()).hexdigest()


def test_an_agent_starts_from_the_wheel_alone(tmp_path: Path) -> None:
    file = tmp_path / payload().wheel
    file.write_bytes(wheel())
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(tmp_path / "there"), str(file)], check=True)
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
        "import makara.worker.agent.agent as a, makara.worker.trainer as t; print(a.__file__, t.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert all(path.startswith(str(tmp_path)) for path in found.stdout.split())


def test_the_versions_are_those_that_are_installed_here() -> None:
    lines = dict(line.split("==") for line in constraints().decode().split())
    for name in ("numpy", "pydantic", "websockets", "anyio"):  # the last is no need of our own
        assert lines[name] == version(name)
    assert not {"torch", "pytest", "makara"} & lines.keys()


def test_vms_get_what_stores_on_azure_need_and_nothing_to_rent_vms_there() -> None:
    lines = dict(line.split("==") for line in constraints().decode().split())
    with zipfile.ZipFile(io.BytesIO(wheel())) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        needs = archive.read(name).decode()
    assert "Requires-Dist: azure-storage-blob" in needs
    assert lines["azure-storage-blob"] == version("azure-storage-blob")
    assert "msal" in lines  # of azure-identity
    assert "azure-mgmt" not in needs
    assert "extra ==" not in needs


def test_the_version_of_torch_is_that_of_the_recipe() -> None:
    assert torch_version("2.12.1+cu126") == "2.12.1"
    assert torch_version(None) == version("torch").partition("+")[0]


# ---- over the wire -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("payload") / "home", tls=True).start()
    running.client.post("/providers/local/capacity", json={"vms": 0})
    yield running
    running.stop()
    release_all(running.home)


def token_of(manager: Manager, job: str, scope: Scope) -> str:
    with closing(TokenStore(manager.home / "tokens.sqlite3")) as tokens:
        return tokens.issue(scope, job=job, vm=f"{job}-vm0", ttl_s=600)


def test_a_vm_fetches_with_its_join_token_and_nobody_else_does(manager: Manager, tmp_path: Path) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    boot = {
        "manager_url": manager.url,
        "job": job,
        "join_token": token_of(manager, job, Scope.JOIN),
        "ca": (manager.home / "ca.pem").read_text(),
    }
    first_boot.keep(str(tmp_path / "wheel"), first_boot.fetch(boot, "wheel"), payload().wheel_sha256)
    assert (tmp_path / "wheel").read_bytes() == wheel()
    assert first_boot.fetch(boot, "constraints") == constraints()
    assert first_boot.fetch(boot, "torch").decode() == torch_version(None)
    path = f"/api/v1/jobs/{job}/boot/wheel"
    join = {"Authorization": f"Bearer {boot['join_token']}"}
    assert manager.http.get(f"/api/v1/jobs/{job}/boot/other", headers=join).status_code == 404
    worker = {"Authorization": f"Bearer {token_of(manager, job, Scope.WORKER)}"}
    assert manager.http.get(path, headers=worker).status_code == 200
    assert manager.http.get(path).status_code == 401
    assert manager.http.get(path, headers={"Authorization": f"Bearer {manager.token}"}).status_code == 401
    stranger = {"Authorization": f"Bearer {token_of(manager, 'other-job', Scope.JOIN)}"}
    assert manager.http.get(path, headers=stranger).status_code == 403


def test_what_is_not_as_the_user_data_says_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not what the user data names"):
        first_boot.keep(str(tmp_path / "wheel"), b"another", payload().wheel_sha256)
    assert not (tmp_path / "wheel").exists()


def test_the_image_is_searched_for_a_python_with_the_right_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_boot, "PYTHONS", [sys.executable])
    there = str(distribution("torch").locate_file(""))
    assert first_boot.choose(f"torch=={torch_version(None)}") == (sys.executable, there)
    assert first_boot.choose("torch==2.0.0") == (sys.executable, None)
    monkeypatch.setattr(first_boot, "PYTHONS", ["/nowhere/python3"])
    with pytest.raises(SystemExit, match=r"no Python of at least 3\.11"):
        first_boot.choose("torch==2.0.0")


def test_the_torch_of_an_images_own_environment_is_not_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_boot, "VENV", str(tmp_path / "venv"))
    there = str(distribution("torch").locate_file(""))  # of the environment that this test runs in
    first_boot.make_venv(sys.executable, there)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--no-index", "--dry-run"]
    wanted = [f"torch=={torch_version(None)}", "--no-deps"]
    found = subprocess.run([*pip, *wanted], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert f"Requirement already satisfied: torch=={torch_version(None)}" in found.stdout


def test_trainers_are_bound_to_the_address_on_the_way_to_the_manager() -> None:
    assert first_boot.address_towards("https://127.0.0.1:8700") == "127.0.0.1"
