"""`makara down`: what a home's manager has at a cloud is shown, and nothing of it is left."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aws_stand import ADDRESS_HOUR, DISK_MONTH, SPOT
from homes import Time, home_of
from makara.manager.cli import main as cli
from makara.manager.cli.clouds.down import down
from makara.manager.home import ConfigError
from makara.manager.service.journal import SqliteJournal
from provider_stands import boot_of
from provider_troubles import Trouble
from rented_vms import AwsCloud, Cloud, cloud_of


@pytest.fixture(params=["aws", "azure"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    with cloud_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[AwsCloud]:
    with cloud_of("aws", tmp_path) as made:
        assert isinstance(made, AwsCloud)
        yield made


class Home:
    """Its manager has run; `rent` is what that did."""

    def __init__(self, cloud: Cloud, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cloud = cloud
        self.path, self.identity = home_of(cloud, folder, patch)
        self.time = Time(during=[cloud.settle])

    def rent(self, *vms: str, identity: str | None = None) -> None:
        with closing(self.cloud.provider(identity or self.identity)) as provider:
            for vm in vms:
                attempt = self.cloud.attempt(vm)
                provider.create(attempt, boot_of(attempt, self.path))

    def down(self, **changes: Any) -> int:
        options = argparse.Namespace(home=self.path, cloud=None, yes=True, json=False)
        return down(argparse.Namespace(**{**vars(options), **changes}), self.time.patience())


@pytest.fixture
def home(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(cloud, tmp_path / "home", monkeypatch)


def test_down_leaves_nothing_of_its_manager_and_all_of_another(
    home: Home, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    home.rent("gpt-vm0", "gpt-vm1")
    home.rent("bert-vm0", identity="another")
    assert home.down() == 0
    left = cloud.billed()
    assert left
    assert all("bert-vm0" in name for name in left)
    shown = capsys.readouterr()
    assert "gpt-vm0" in shown.out
    assert "bert" not in shown.out
    assert "nothing is left" in shown.err
    assert home.down() == 0  # nothing is there, and it is no fault
    assert "carries the tag" in capsys.readouterr().out


def test_where_no_manager_is_known_no_cloud_is_asked_and_it_is_no_success(
    aws: AwsCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(aws, tmp_path / "home", monkeypatch)
    home.rent("gpt-vm0")
    (home.path / "tokens.sqlite3").unlink()  # as in a home that somebody else's was copied to
    asked = len(aws.stand.aws.calls)
    assert cli.main(["down", "-y", "--home", str(home.path)]) == 2
    told = capsys.readouterr()
    assert "no manager is known in" in told.err
    assert "nothing" not in told.out + told.err
    assert len(aws.stand.aws.calls) == asked
    assert aws.billed() != []


def test_what_a_vm_costs_is_shown_before_it_is_ended(
    aws: AwsCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(aws, tmp_path / "home", monkeypatch)
    home.rent("gpt-vm0")
    assert home.down(json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["found"]
    assert (found["vm"], found["kind"], found["market"], found["instance_type"]) == (
        "gpt-vm0", "vm", "spot", "g4dn.xlarge",
    )  # fmt: skip
    hour = SPOT["us-east-1a"] + ADDRESS_HOUR + 100 * DISK_MONTH / 730
    assert found["hourly"] == pytest.approx(hour)


def test_lists_that_lag_are_asked_again_for_as_long_as_they_may(
    home: Home, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manager wrote its journal, asked for a VM, and was killed."""
    SqliteJournal(home.path / "journal.sqlite3").close()
    for file in home.path.glob("journal.sqlite3*"):
        os.utime(file, (home.time.now, home.time.now))
    cloud.hide_new()
    home.rent("gpt-vm0")
    home.time.during = [lambda: home.time.slept > 5 and cloud.settle()]
    assert home.down() == 0
    assert cloud.billed() == []
    assert "nothing in" in capsys.readouterr().out  # at first
    assert home.time.slept > 5


def test_a_cloud_that_answers_nothing_leaves_it_unknown_and_is_no_success(
    aws: AwsCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(aws, tmp_path / "home", monkeypatch)
    home.rent("gpt-vm0")
    home.time.during = [lambda: aws.stand.trouble(Trouble.THROTTLED)]
    assert home.down() == 1
    assert "left: aws: list VMs" in capsys.readouterr().err
    aws.stand.relieve(Trouble.THROTTLED)
    home.time.during = [aws.settle]
    assert home.down() == 0
    assert aws.billed() == []


def test_what_cannot_be_listed_at_all_is_refused_before_anything_is_asked(
    aws: AwsCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(aws, tmp_path / "home", monkeypatch)
    aws.stand.aws.expired = True
    with pytest.raises(ConfigError, match=r"cannot be listed: .*ExpiredToken"):
        home.down()


def test_disks_and_interfaces_that_hang_on_nothing_are_deleted(
    aws: AwsCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(aws, tmp_path / "home", monkeypatch)
    aws.stand.leave_disk(home.identity, "gpt-vm7")
    assert home.down() == 0
    assert "gpt-vm7" in capsys.readouterr().out
    assert aws.billed() == []


def test_down_asks_and_takes_no_for_an_answer(
    home: Home, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.rent("gpt-vm0")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n")
    assert home.down(yes=False) == 1
    assert cloud.billed()
    monkeypatch.setattr("sys.stdin.readline", lambda: "y\n")
    assert home.down(yes=False) == 0
    assert cloud.billed() == []


def test_down_without_anybody_to_ask_needs_y(home: Home, cloud: Cloud) -> None:
    home.rent("gpt-vm0")
    with pytest.raises(ConfigError, match="give -y"):
        home.down(yes=False)
    assert cloud.billed()


def test_a_manager_that_runs_in_the_home_is_to_be_ended_first(
    home: Home, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    home.rent("gpt-vm0")
    journal = SqliteJournal(home.path / "journal.sqlite3")
    assert cli.main(["down", "-y", "--home", str(home.path)]) == 2
    assert "would ask for other VMs: end it first" in capsys.readouterr().err
    assert cloud.billed()
    journal.close()


def test_no_manager_starts_while_its_vms_are_ended(home: Home) -> None:
    SqliteJournal(home.path / "journal.sqlite3").close()
    refused: list[str] = []

    def start() -> None:
        try:
            SqliteJournal(home.path / "journal.sqlite3").close()
        except Exception as error:
            refused.append(type(error).__name__)

    home.time.during.append(start)
    assert home.down() == 0
    assert set(refused) == {"JournalLocked"}


def test_a_home_without_settings_of_that_cloud_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, arguments, message in (
        (None, [], "clouds.yaml: is not there"),
        ("", [], "clouds.yaml: has no section of a cloud"),
        ("", ["azure"], "clouds.yaml: has no section azure"),
    ):
        if settings is not None:
            (tmp_path / "clouds.yaml").write_text(settings)
        assert cli.main(["down", *arguments, "-y", "--home", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
