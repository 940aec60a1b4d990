"""What `makara apply` refuses before a VM is rented: with status 2 and the field, and no call that rents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from makara.manager.cli import apply as cli_apply
from makara.manager.cli import main as cli
from managers import job_spec
from provider_troubles import Trouble
from rented_vms import OPTIONS, AwsCloud, AzureAccountInUse, Cloud, RentingManager, cloud_of
from service_process import ServiceProcess

LARGE = 70_000_000  # parameters
MODEL = {
    "num_parameters": 2 * LARGE, "num_sections": 2, "shared_parameters": {}, "seconds": 1.0,
    "parameter_types": ["float32"], "frozen_sections": [], "not_compared": None, "notes": [],
    "largest_differences": {"loss": 0.0},
    "sections": [{"num_parameters": 10}, {"num_parameters": LARGE}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("before_renting")


@pytest.fixture(scope="module", params=["aws", "azure"])
def cloud(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cloud]:
    (folder / request.param).mkdir()
    with cloud_of(request.param, folder / request.param) as made:
        yield made


@pytest.fixture(scope="module")
def manager(cloud: Cloud, folder: Path) -> Iterator[RentingManager]:
    made = RentingManager(folder / f"{cloud.name}-manager", cloud)
    made.service.start()
    yield made
    made.close()


class Applied:
    """`makara apply` of a job file, whose code passes."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._file = tmp_path / "job.yaml"
        self._store = tmp_path / "store"
        self._capsys = capsys
        (tmp_path / "train.py").write_text("pass\n")

    def __call__(self, service: ServiceProcess, resources: dict[str, Any]) -> tuple[int, str]:
        """(status, what it says)."""
        spec = job_spec(self._store)
        self._file.write_text(yaml.safe_dump({**spec, "resources": {"max_nodes": 2, **resources}}))
        status = cli.main(["apply", "-y", "-f", str(self._file), "--detach", "--home", str(service.home)])
        return status, self._capsys.readouterr().err


@pytest.fixture
def applied(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Applied:
    monkeypatch.setattr(cli_apply, "check_code", lambda spec, workdir, *, compare, begin: MODEL)
    return Applied(tmp_path, capsys)


def assert_nothing_is_rented(service: ServiceProcess, *clouds: Cloud) -> None:
    assert not service.client.get("/jobs")["jobs"]
    assert not any(cloud.num_asked() or cloud.billed() for cloud in clouds)


# ---- the wish ----------------------------------------------------------------------------------------------

WISHES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "aws": [
        ({"instance_type": "g4dn.huge"}, "instance_type", "g4dn.huge"),
        ({"min_nodes": 17, "max_nodes": 20}, "instance_type", "and quota L-3819A6DF"),
        ({"instance_type": "m5.large"}, "hourly_price", "no price of m5.large at aws is known; state one"),
        ({"workers_per_node": 2}, "instance_type", "has 1 GPUs, fewer than workers_per_node (2)"),
        ({"region": "mars-1"}, "region", "this manager has no region mars-1"),
        ({"max_hourly_cost": 0.1}, "max_hourly_cost", "0.1, but min_nodes (1) of g4dn.xlarge may"),
        ({"budget": 0.1}, "budget", "0.1, but min_nodes (1) of g4dn.xlarge may"),
        (
            {"min_nodes": 2, "max_hourly_cost": 1.0},
            "max_hourly_cost",
            "1, but min_nodes (2) of g4dn.xlarge may cost 1.08",
        ),
    ],
    "azure": [
        ({"instance_type": "Standard_Nothing"}, "instance_type", "is no type that Azure has in westeurope"),
        ({"min_nodes": 13, "max_nodes": 13}, "min_nodes", "0 of 50 are in use: ask for more quota"),
        ({"instance_type": "Standard_E4s_v5"}, "hourly_price", "no price of Standard_E4s_v5 at azure"),
        ({"workers_per_node": 5}, "instance_type", "has 4 vCPUs; workers_per_node times threads is 5"),
        ({"region": "eastus"}, "region", "is in westeurope"),
        ({"max_hourly_cost": 0.1}, "max_hourly_cost", "0.1, but min_nodes (1) of Standard_D4s_v5 may"),
        ({"budget": 0.1}, "budget", "0.1, but min_nodes (1) of Standard_D4s_v5 may"),
        (
            {"min_nodes": 2, "max_hourly_cost": 0.4},
            "max_hourly_cost",
            "0.4, but min_nodes (2) of Standard_D4s_v5 may cost 0.46",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("index", range(8))
def test_a_wish_that_cannot_be_granted_is_refused_before_anything_is_rented(
    cloud: Cloud, manager: RentingManager, applied: Applied, index: int
) -> None:
    changes, field, told = WISHES[cloud.name][index]
    status, said = applied(manager.service, {**cloud.resources, **changes})
    assert status == cli.MISTAKE
    assert f" resources.{field}: " in said
    assert told in said
    assert_nothing_is_rented(manager.service, cloud)


def test_a_type_that_holds_no_part_of_the_model_is_refused(
    cloud: Cloud, manager: RentingManager, applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"aws": "t3.nano", "azure": "Standard_B2s"}[cloud.name]
    wish = {**cloud.resources, "instance_type": small, "use_spot": False, "hourly_price": 0.05}
    if cloud.name == "azure":  # its smallest has 4 GiB
        sections = [{"num_parameters": 10 * LARGE}]
        monkeypatch.setattr(cli_apply, "check_code", lambda *_, **__: {**MODEL, "sections": sections})
    status, said = applied(manager.service, wish)
    assert status == cli.MISTAKE
    assert f"resources.instance_type: {small} has " in said
    assert "MiB for each worker, and section" in said
    assert_nothing_is_rented(manager.service, cloud)


def test_vms_that_do_not_hold_the_model_together_are_refused(
    cloud: Cloud, manager: RentingManager, applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [{"num_parameters": 10 * LARGE}] * 12
    monkeypatch.setattr(cli_apply, "check_code", lambda *_, **__: {**MODEL, "sections": sections})
    status, said = applied(manager.service, {**cloud.resources, "max_nodes": 1})
    assert status == cli.MISTAKE
    has = {"aws": "13,824", "azure": "16,384"}[
        cloud.name
    ]  # a GPU's, less what is not planned with; a machine's
    assert f"resources.max_nodes: all workers together have {has} MiB, and weights and gradients" in said
    assert_nothing_is_rented(manager.service, cloud)


# ---- the account -------------------------------------------------------------------------------------------


def test_credentials_that_a_cloud_does_not_take_any_more_are_refused(
    cloud: Cloud, manager: RentingManager, applied: Applied
) -> None:
    end_credentials(cloud, ended=True)
    try:
        status, said = applied(manager.service, cloud.resources)
    finally:
        end_credentials(cloud, ended=False)
    assert status == cli.MISTAKE
    assert "resources.provider: " in said
    assert {"aws": "ExpiredToken", "azure": "does not accept the manager's credentials"}[cloud.name] in said
    assert_nothing_is_rented(manager.service, cloud)


def test_a_cloud_that_does_not_answer_is_told_and_nothing_is_stored(
    cloud: Cloud, manager: RentingManager, applied: Applied
) -> None:
    set_reachable(cloud, reachable=False)
    try:
        status, said = applied(manager.service, cloud.resources)
    finally:
        set_reachable(cloud, reachable=True)
    assert status == cli.UNREACHABLE
    assert f"resources.provider: {cloud.name} cannot be asked now" in said
    assert_nothing_is_rented(manager.service, cloud)


def test_credentials_that_are_nowhere_to_be_found_are_refused(
    cloud: Cloud, applied: Applied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET")
    for name in secrets:  # tests of stores may have them
        monkeypatch.delenv(name, raising=False)
    kept = cloud.environment
    cloud.environment = {name: value for name, value in kept.items() if name not in secrets}
    made = RentingManager(tmp_path / "manager", cloud)
    cloud.environment = kept
    try:
        made.service.start()
        status, said = applied(made.service, cloud.resources)
        assert_nothing_is_rented(made.service, cloud)
    finally:
        made.close()
    assert status == cli.MISTAKE
    assert "resources.provider: " in said
    assert "credential" in said


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_a_job_that_is_to_go_on_is_refused_as_a_new_one_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cloud_of(name, tmp_path) as cloud:
        made = RentingManager(tmp_path / "manager", cloud)
        service = made.service
        try:
            service.start()
            training = {"global_batch_size": 4, "steps": 20}
            job = service.submit("pass\n", resources={**cloud.resources, "max_nodes": 1}, training=training)
            made.await_user_data(cloud, 0)
            service.client.post(f"/jobs/{job}/stop")
            service.wait_status(job, "stopped")
            made.await_nothing_billed(cloud)
            asked = cloud.num_asked()
            end_credentials(cloud, ended=True)
            status = cli.main(["resume", job, "--home", str(service.home)])
            assert status == cli.MISTAKE
            assert "resources.provider: " in capsys.readouterr().err
            assert service.job(job)["status"] == "stopped"
            assert cloud.num_asked() == asked
        finally:
            made.close()


def end_credentials(cloud: Cloud, *, ended: bool) -> None:
    if isinstance(cloud, AwsCloud):
        cloud.stand.aws.expired = ended
    elif isinstance(cloud, AzureAccountInUse):
        cloud.cloud.stand_in.expired = ended


def set_reachable(cloud: Cloud, *, reachable: bool) -> None:
    if isinstance(cloud, AwsCloud):
        (cloud.stand.relieve if reachable else cloud.stand.trouble)(Trouble.UNREACHABLE)
    elif isinstance(cloud, AzureAccountInUse):
        cloud.cloud.stand_in.unreachable = not reachable


# ---- the manager -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "https://127.0.0.1:"),
        (("--no-tls",), "plain HTTP"),
        (("--public-url", "https://localhost:8700"), "is a loopback address"),
        (("--public-url", "https://169.254.1.2:8700"), "is no address that other networks know"),
        (("--public-url", "https://nowhere.invalid:8700"), "nowhere.invalid cannot be resolved"),
    ],
)
def test_an_address_that_vms_cannot_use_is_refused(
    tmp_path: Path, applied: Applied, options: tuple[str, ...], told: str
) -> None:
    with cloud_of("aws", tmp_path) as cloud:
        made = RentingManager(tmp_path / "manager", cloud, options=options)
        try:
            made.service.start()
            status, said = applied(made.service, cloud.resources)
            assert_nothing_is_rented(made.service, cloud)
        finally:
            made.close()
    assert status == cli.MISTAKE
    assert "resources.provider: VMs of clouds cannot use this manager's address" in said
    assert told in said
    assert "start it with --public-url" in said


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_a_cloud_that_the_settings_do_not_name_is_refused(
    name: str, tmp_path: Path, applied: Applied
) -> None:
    with cloud_of("azure" if name == "aws" else "aws", tmp_path) as other, cloud_of(name, tmp_path) as wanted:
        made = RentingManager(tmp_path / "manager", other, options=OPTIONS)
        try:
            made.service.start()
            status, said = applied(made.service, wanted.resources)
            assert_nothing_is_rented(made.service, wanted, other)
        finally:
            made.close()
    assert status == cli.MISTAKE
    assert f"resources.provider: this manager has no provider {name}" in said
    assert f"clouds.yaml in its home is to have a section {name}" in said
