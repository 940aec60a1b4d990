"""`makara up` until its VM boots: one VM is asked for, whatever happens, and `makara down` ends it."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure_account import ADDRESSES, GROUP, HOST_GROUP, MACHINES
from launches import Home
from makara.manager.authority import Authority
from makara.manager.boot.cloud_config import MOST_BYTES, TooLarge
from makara.manager.cli import main as cli
from makara.manager.cli.client import Unreachable, connect
from makara.manager.home import ConfigError
from makara.manager.hosting import launching
from makara.manager.hosting.ending import LAG_S
from makara.manager.hosting.record import VmRecord
from makara.manager.hosting.user_data import user_data
from makara.manager.spec.placement import Offer
from makara.protocol.messages import VmEnding
from provider_stands import boot_of
from provider_troubles import Trouble
from rented_vms import AwsCloud, AzureAccountInUse, Cloud, cloud_of
from tls_server import tls_server
from written_files import files_in


@pytest.fixture(params=["aws", "azure"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    with cloud_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def home(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(cloud, tmp_path / "home", monkeypatch)


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with cloud_of("aws", tmp_path) as made:
        yield Home(made, tmp_path / "home", monkeypatch)


def stand(home: Home) -> Any:
    assert isinstance(home.cloud, AwsCloud)
    return home.cloud.stand


def vms(cloud: Cloud) -> int:
    if isinstance(cloud, AwsCloud):
        return sum(i.state != "terminated" for i in cloud.stand.aws.ec2.all_instances())
    assert isinstance(cloud, AzureAccountInUse)
    return len(cloud.cloud.names(MACHINES))


# ---- one VM ------------------------------------------------------------------------------------------------


def test_one_vm_is_asked_for_on_demand_as_the_manager(aws: Home) -> None:
    aws.up(cut_off="_met")
    (asked,) = stand(aws).aws.requests
    assert asked["InstanceType"] == "t3.medium"
    assert asked["IamInstanceProfile.Name"] == "makara-manager"
    group = stand(aws).aws.ec2.get_security_group_from_id(asked["NetworkInterface.1.SecurityGroupId.1"])
    assert group.name == "manager"
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert not any(name.startswith("InstanceMarketOptions") for name in asked)
    (made,) = stand(aws).aws.ec2.all_instances()
    tags = {tag["key"]: tag["value"] for tag in made.get_tags()}
    assert tags["makara:manager"] == f"up-{aws.record.identity}"


def test_on_azure_it_has_the_managers_identity_and_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with cloud_of("azure", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch)
        home.up(cut_off="_met")
        assert "azure.ca_file is not sent" in capsys.readouterr().err
        assert isinstance(cloud, AzureAccountInUse)
        (name,) = cloud.cloud.names(MACHINES)
        body = cloud.cloud.account.resources[MACHINES, name]
        assert body["id"].split("/")[4] == HOST_GROUP  # where no worker may delete anything
        (identity,) = body["identity"]["userAssignedIdentities"]
        assert identity.endswith("/makara-manager")
        assert body["properties"]["priority"] == "Regular"
        assert body["tags"]["makara-manager"] == f"up-{home.record.identity}"
        assert len(name) <= 64
        assert cloud.cloud.names(ADDRESSES)
        assert home.boot_file()["ending"]["identity_id"] == identity


def test_on_azure_it_does_not_lie_among_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with cloud_of("azure", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch, resource_group=GROUP)
        assert main(home) == 2
        assert "azure.manager.resource_group: is that of worker VMs" in capsys.readouterr().err
        assert vms(cloud) == 0


def test_a_call_that_was_cut_off_goes_on_with_its_vm(home: Home, cloud: Cloud) -> None:
    home.up(cut_off="_met")
    before = home.record
    home.up(cut_off="_met")
    assert vms(cloud) == 1
    assert home.record == before
    assert len(set(cloud.user_data())) == 1


def test_the_vm_that_is_there_already_is_not_missing_in_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cloud_of("azure", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch)
        home.up(cut_off="_met")
        assert isinstance(cloud, AzureAccountInUse)
        cloud.cloud.account.quotas["cores"] = (2, 2)
        home.up(cut_off="_met")
        assert vms(cloud) == 1


def test_killed_between_the_record_and_the_call_it_asks_with_the_same_name(home: Home, cloud: Cloud) -> None:
    home.up(cut_off="_create")
    assert vms(cloud) == 0
    before = home.record
    home.up(cut_off="_met")
    assert vms(cloud) == 1
    assert home.record == before


def test_a_lost_answer_makes_no_second_vm(aws: Home) -> None:
    stand(aws).trouble(Trouble.LOST_ANSWER)
    aws.up(cut_off="_met")
    assert stand(aws).aws.calls.count("RunInstances") == 2
    assert vms(aws.cloud) == 1


def test_a_vm_that_nobody_met_in_time_gives_way_to_one_with_another_secret(home: Home, cloud: Cloud) -> None:
    home.up(cut_off="_met")
    first = home.boot_file()
    home.time.now += 3600.0
    home.up(cut_off="_met")
    assert vms(cloud) == 1
    assert home.record.attempt.number == 2
    second = home.boot_file()
    assert second["secret"] != first["secret"]
    assert second["payload_sha256"] == first["payload_sha256"]


def test_a_vm_that_ends_before_it_is_a_manager_gives_way_to_another(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends() -> None:
        if aws.time.slept == 2:
            stand(aws).end("manager")

    aws.time.during.append(ends)
    assert aws.up() == 1  # for nobody ever answers
    assert aws.record.attempt.number == 2
    assert vms(aws.cloud) == 1
    told = capsys.readouterr().err
    assert "the VM has ended" in told
    assert "the VM says that it boots" in told  # its console
    assert "call `makara up` again to go on" in told


def test_another_place_is_tried_where_one_has_no_capacity(aws: Home) -> None:
    stand(aws).aws.refusal = ("InsufficientInstanceCapacity", 500)
    aws.up(cut_off="_met")
    assert aws.record.attempt.placement.zone == "us-east-1b"
    assert vms(aws.cloud) == 1


def test_a_repeated_call_goes_on_with_the_type_of_its_vm(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.up(cut_off="_create", instance_type="g4dn.xlarge")
    aws.up(cut_off="_met")
    assert [asked["InstanceType"] for asked in stand(aws).aws.requests] == ["g4dn.xlarge"]
    assert main(aws, "--instance-type", "t3.medium") == 2
    assert "instance_type: the manager's VM was asked for with g4dn.xlarge" in capsys.readouterr().err


def test_a_refusal_after_a_call_that_was_throttled_is_believed(aws: Home) -> None:
    aws.up(cut_off="_create")
    stand(aws).trouble(Trouble.THROTTLED)

    def refused() -> None:
        stand(aws).relieve(Trouble.THROTTLED)
        stand(aws).trouble(Trouble.REFUSED)

    aws.time.during.append(refused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("makara.manager.cli.clouds.up._offers", lambda *_, **__: [offer_of(aws)])
        with pytest.raises(ConfigError, match="nothing was made"):
            aws.up()
    assert aws.folder.read() is None


def offer_of(home: Home) -> Offer:
    return Offer(placement=home.record.attempt.placement, price=None)


def test_a_machine_that_slept_past_the_deadline_looks_once_more(
    aws: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "answers", lambda *_: aws.time.now - began > 10_000)
    is_at(monkeypatch, "192.0.2.1")

    def meets(*arguments: Any) -> None:
        arguments[-1]("an authority")
        aws.time.during.append(sleeps)

    def sleeps() -> None:
        aws.time.now += 20_000

    monkeypatch.setattr(launching, "pair", meets)
    began = aws.time.now
    assert aws.up() == 0
    assert vms(aws.cloud) == 1


def test_when_its_time_is_over_the_console_is_shown(aws: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert aws.up() == 1
    told = capsys.readouterr().err
    assert "the manager does not answer yet" in told
    assert "the VM says that it boots" in told


def test_a_certificate_of_somebody_else_is_told(
    aws: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "another").mkdir()
    other = Authority(tmp_path / "another", ["127.0.0.1"])
    is_at(monkeypatch, "127.0.0.1")
    expected = Authority(aws.path, []).certificate
    monkeypatch.setattr(launching, "pair", lambda *arguments: arguments[-1](expected))
    with tls_server(other) as (_, port):
        aws.set_port(port)
        assert aws.up() == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


def is_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(launching, "addresses", lambda there: (address, address) if there else ("", ""))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda home: stand(home).end("manager"), "its VM has ended"),
        (lambda home: home.folder.is_up("https://192.0.2.9:8700"), "its address is now"),
        (lambda home: None, "192.0.2.1: your own address may be another one than its security group admits"),
    ],
)
def test_why_a_manager_does_not_answer_its_cloud_is_asked(
    aws: Home, change: Callable[[Home], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.up(cut_off="_met")
    monkeypatch.setattr("makara.manager.cli.clouds.up.answers", lambda *_: False)
    monkeypatch.setattr(launching, "addresses", lambda _: ("192.0.2.1", "192.0.2.1"))
    aws.folder.trust("an authority")
    aws.folder.is_up("https://192.0.2.1:8700")
    change(aws)
    with pytest.raises(Unreachable, match=told):
        aws.up()


@pytest.mark.parametrize("port", [443, 1023])
def test_a_port_that_only_root_may_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    with cloud_of("aws", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch, port=port)
        assert main(home) == 2
        assert "aws.manager.port" in capsys.readouterr().err


def test_commands_ask_the_newest_manager_of_a_home(aws: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAKARA_SERVER", "MAKARA_TOKEN", "MAKARA_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    aws.up(cut_off="_met")
    aws.folder.is_up("http://127.0.0.1:1")
    local = aws.path / "server.json"
    local.write_text('{"url": "http://127.0.0.1:2"}')
    (aws.path / "admin.token").write_text("token")
    options = argparse.Namespace(home=aws.path, server=None, token=None, ca_file=None)
    for time, url in ((1.0, "http://127.0.0.1:1"), (4e9, "http://127.0.0.1:2")):
        os.utime(local, (time, time))
        with connect(options) as client:
            assert client.url == url


# ---- what is refused ---------------------------------------------------------------------------------------


def main(home: Home, *arguments: str) -> int:
    return cli.main(["up", home.cloud.name, "-y", "--home", str(home.path), *arguments])


@pytest.mark.parametrize(
    ("break_it", "field"),
    [
        (lambda aws: setattr(aws, "expired", True), "provider: "),
        (lambda aws: setattr(aws, "quota", 1.0), "instance_type: 1 t3.medium have 2 vCPUs, and quota"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_field_and_asks_for_nothing(
    aws: Home, break_it: Callable[[Any], None], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(stand(aws).aws)
    assert main(aws) == 2
    assert field in capsys.readouterr().err
    assert stand(aws).aws.requests == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--instance-type", "t9.huge"], "instance_type: "),
        (["--instance-type", "Standard_B2s"], "instance_type: "),
        (["--region", "mars-1"], "region: "),
    ],
)
def test_a_wish_that_aws_does_not_know_is_refused(
    aws: Home, arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(aws, *arguments) == 2
    assert field in capsys.readouterr().err
    assert stand(aws).aws.requests == []


def test_without_a_section_for_it_there_is_no_up(aws: Home, capsys: pytest.CaptureFixture[str]) -> None:
    (aws.path / "clouds.yaml").write_text(yaml.safe_dump({"aws": aws.cloud.section()}))
    assert main(aws) == 2
    assert "aws.manager: is required" in capsys.readouterr().err
    assert cli.main(["up", "azure", "-y", "--home", str(aws.path)]) == 2
    assert "azure: is required" in capsys.readouterr().err


def test_it_asks_first_with_type_region_and_price(
    aws: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"nobody is there .* give -y"):
        aws.up(yes=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    assert aws.up(yes=False) == 1
    told = capsys.readouterr().err
    for part in ("t3.medium", "us-east-1", "on demand", "$0.0499", "port 8700"):  # with disk and address
        assert part in told
    assert stand(aws).aws.requests == []
    assert aws.folder.read() is None
    with pytest.raises(ConfigError, match="no manager is known"):
        aws.down()


def test_a_refusal_leaves_no_record(aws: Home) -> None:
    stand(aws).trouble(Trouble.REFUSED)
    with pytest.raises(ConfigError, match=r"UnauthorizedOperation.*nothing was made"):
        aws.up()
    assert aws.folder.read() is None


def test_a_refusal_is_not_believed_where_an_earlier_call_may_have_made_a_vm(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.up(cut_off="_met")
    stand(aws).aws._tokens.clear()  # as AWS forgets them
    stand(aws).trouble(Trouble.REFUSED)
    assert aws.up() == 1
    assert "an earlier call may have made a VM: `makara down`" in capsys.readouterr().err
    assert aws.folder.read() is not None
    assert aws.down() == 0
    assert aws.cloud.billed() == []


def test_one_home_has_one_manager(aws: Home, capsys: pytest.CaptureFixture[str]) -> None:
    aws.up(cut_off="_met")
    assert cli.main(["up", "azure", "-y", "--home", str(aws.path)]) == 2
    assert "cloud: a manager of" in capsys.readouterr().err
    with aws.folder.held():
        assert main(aws) == 2
    assert "at work" in capsys.readouterr().err


# ---- what the cloud is shown -------------------------------------------------------------------------------


def test_user_data_is_small_and_holds_no_secret_that_lasts(home: Home, cloud: Cloud) -> None:
    home.up(cut_off="_met")
    (data,) = cloud.user_data()
    assert len(data) <= MOST_BYTES
    config = yaml.safe_load(data)
    assert next(iter(config)) == "bootcmd"
    paired, installed = (command[-1] for command in config["bootcmd"])
    program = "timeout 660 python3 /etc/makara-manager/end_vm.py /etc/makara-manager/boot.json 600"
    assert paired.startswith("test -e /etc/makara-manager/paired || ")
    assert installed.startswith("test -e /etc/makara-manager/installed || systemctl is-active --quiet makara")
    assert all(text.endswith(f"{program} || systemctl poweroff --force") for text in (paired, installed))
    assert len({command[2] for command in config["bootcmd"]}) == 2  # the names of the timers
    modes = {file["path"]: file["permissions"] for file in config["write_files"]}
    assert {mode for path, mode in modes.items() if path.startswith("/etc/makara-manager/")} == {"0600"}
    boot = home.boot_file()
    assert boot["pair_within_s"] == 900.0
    assert boot["payload_sha256"] == hashlib.sha256(home.folder.payload).hexdigest()
    shown = "".join(files_in(data).values()) + data.decode()
    token = home.folder.token
    theirs = [value for name, value in cloud.environment.items() if "SECRET_" in name and len(value) > 3]
    for secret in (token, token.partition(".")[2], *theirs):
        assert secret not in shown
    for file in home.folder.path.iterdir():
        if file.name != "record.json.lock":
            assert file.stat().st_mode & 0o077 == 0, file


def test_user_data_that_no_cloud_would_take_is_refused(home: Home) -> None:
    home.up(cut_off="_met")
    record: VmRecord = home.record.model_copy(update={"secret": "".join(map(str, range(20000)))})
    with pytest.raises(TooLarge, match="16384 are allowed"):
        user_data(record, VmEnding(kind="power_off"))


@pytest.mark.clouds
def test_cloud_init_finds_no_fault_in_it(aws: Home, tmp_path: Path) -> None:
    assert shutil.which("cloud-init") is not None, "apt-get install cloud-init"
    aws.up(cut_off="_met")
    file = tmp_path / "user-data"
    file.write_bytes(aws.cloud.user_data()[0])
    command = ["cloud-init", "schema", "--config-file", str(file)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


# ---- down --------------------------------------------------------------------------------------------------


def rent(home: Home, *vms: str) -> None:
    """As the manager that is up does it."""
    with closing(home.cloud.provider(home.record.identity)) as provider:
        for vm in vms:
            attempt = home.cloud.attempt(vm)
            provider.create(attempt, boot_of(attempt, home.path))


def test_down_ends_the_manager_first_then_what_it_rented_and_forgets_it(
    home: Home, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    home.up(cut_off="_met")
    rent(home, "gpt-vm0")
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        names = cloud.billed()
        seen.append((any("manager-1-" in n or n == "manager" for n in names), any("gpt" in n for n in names)))

    home.time.during.append(look)
    capsys.readouterr()
    assert home.down() == 0
    assert cloud.billed() == []
    assert not home.folder.path.exists()
    shown = capsys.readouterr().out
    assert "manager" in shown
    assert "gpt-vm0" in shown
    assert (False, True) in seen  # the manager is gone, and what it rented is not yet
    assert (True, False) not in seen
    with pytest.raises(ConfigError, match="no manager is known"):
        home.down()


def test_the_folder_of_a_manager_is_taken_for_its_home_by_down_and_refused_by_up(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.up(cut_off="_met")
    assert cli.main(["up", "aws", "-y", "--home", str(aws.folder.path)]) == 2
    assert f"its home is {aws.path}" in capsys.readouterr().err
    assert vms(aws.cloud) == 1
    aws.path = aws.folder.path
    assert aws.down() == 0
    assert aws.cloud.billed() == []
    assert not aws.folder.path.exists()


def test_nobody_else_begins_while_down_removes_what_it_holds(aws: Home) -> None:
    aws.up(cut_off="_met")
    with aws.folder.held():
        aws.folder.remove()
        with pytest.raises(ConfigError, match="at work"), aws.folder.held():
            pass


def test_what_hangs_on_no_vm_is_ended_as_well_its_address_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cloud_of("azure", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch)
        home.up(cut_off="_met")
        assert isinstance(cloud, AzureAccountInUse)
        (name,) = cloud.cloud.names(MACHINES)
        cloud.cloud.account.resources.pop((MACHINES, name))
        assert cloud.cloud.names(ADDRESSES)
        assert home.down() == 0
        assert cloud.billed() == []


def test_a_down_right_after_up_waits_for_no_vm_that_it_has_seen(
    home: Home, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has met the VM, so it rented none. Found: two times five minutes."""
    home.up(cut_off="_met")
    began = home.time.now
    os.utime(home.folder.path / "record.json", (began, began))
    assert home.down() == 0
    assert cloud.billed() == []
    assert home.time.now - began < LAG_S
    assert "minutes" not in capsys.readouterr().err


def test_a_vm_that_was_asked_for_and_is_in_no_list_is_waited_for(home: Home, cloud: Cloud) -> None:
    began = home.time.now
    cloud.hide_new()
    home.up(cut_off="_met")
    os.utime(home.folder.path / "record.json", (began, began))
    home.time.during = [lambda: home.time.now - began > 200 and cloud.settle()]
    assert home.down() == 0
    assert cloud.billed() == []


def test_a_down_that_was_cut_off_waits_for_the_rest_alone(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.up(cut_off="_met")
    aws.folder.trust("its authority")

    def cut_off() -> None:
        ended_at = aws.folder.ended_at
        if ended_at is not None and aws.time.now - ended_at > 200:
            raise KeyboardInterrupt

    aws.time.during.append(cut_off)
    with pytest.raises(KeyboardInterrupt):
        aws.down()
    assert "waits for the rest of them alone" in capsys.readouterr().err
    ended_at = aws.folder.ended_at
    assert ended_at is not None
    aws.time.during.remove(cut_off)
    assert aws.down() == 0
    assert ended_at + LAG_S <= aws.time.now < ended_at + 2 * LAG_S


def test_another_vm_after_a_down_that_was_cut_off_is_waited_for_from_its_own_end(aws: Home) -> None:
    aws.up(cut_off="_met")
    aws.folder.has_ended(aws.time.now - 1000.0)
    aws.up(cut_off="_met")
    assert aws.folder.ended_at is None


def test_down_names_the_group_of_the_manager_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with cloud_of("azure", tmp_path) as cloud:
        home = Home(cloud, tmp_path / "home", monkeypatch)
        home.up(cut_off="_met")
        assert home.down() == 0
    assert f"nothing is left in azure ({GROUP}, {HOST_GROUP})" in capsys.readouterr().err


def test_what_the_manager_asked_for_last_is_waited_for(home: Home, cloud: Cloud) -> None:
    home.up(cut_off="_met")
    home.folder.trust("its authority")
    cloud.hide_new()
    rent(home, "gpt-vm0")
    began = home.time.now
    home.time.during = [lambda: home.time.now - began > 200 and cloud.settle()]
    assert home.down() == 0
    assert cloud.billed() == []
    assert home.time.now - began >= 300


def test_a_down_that_was_killed_at_its_last_step_hinders_no_other_up(aws: Home) -> None:
    aws.up(cut_off="_met")
    aws.folder.is_up("https://192.0.2.1:8700")
    (aws.folder.path / "record.json").unlink()
    stand(aws).end("manager")
    aws.up(cut_off="_met")
    assert aws.folder.url is None
    assert vms(aws.cloud) == 1


def test_down_of_one_cloud_leaves_no_manager_that_rents_in_another(
    aws: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.up(cut_off="_met")
    assert cli.main(["down", "azure", "-y", "--home", str(aws.path)]) == 2
    assert "leave the cloud out" in capsys.readouterr().err
    assert vms(aws.cloud) == 1
    assert aws.down("aws") == 0
    assert aws.cloud.billed() == []
