"""`makara up` at the stand-in of a cloud: its home, and what it asked for."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from homes import Time
from makara.manager.cli.clouds.down import down
from makara.manager.cli.clouds.up import up
from makara.manager.hosting import launching
from makara.manager.hosting.ending import Patience
from makara.manager.hosting.pairing import NobodyThere
from makara.manager.hosting.record import UpFolder, VmRecord
from makara.manager.providers.azure import opening
from makara.manager.providers.azure.provider import AzureProvider
from rented_vms import Cloud
from written_files import files_in


class CutOff(BaseException):
    """The process is killed there."""


class Home:
    """A home whose clouds.yaml has a section `manager`. Its VMs boot nothing."""

    def __init__(self, cloud: Cloud, path: Path, patch: pytest.MonkeyPatch, **manager: Any) -> None:
        """`manager`: of that section."""
        self.cloud, self.path = cloud, path
        self.time = Time(during=[cloud.settle])
        self.folder = UpFolder(path)
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        patch.setattr("makara.manager.providers.aws.provider._LIST_S", 0.0)
        patch.setattr(opening, "AzureProvider", partial(AzureProvider, poll_s=0.001, list_s=0.0))
        patch.setattr(launching, "pair", _nobody)
        path.mkdir()
        section = {**cloud.section(), "manager": {**cloud.manager_section(), **manager}}
        (path / "clouds.yaml").write_text(yaml.safe_dump({cloud.name: section}))

    def set_port(self, port: int) -> None:
        """Of the manager."""
        file = self.path / "clouds.yaml"
        told = yaml.safe_load(file.read_text())
        told[self.cloud.name]["manager"]["port"] = port
        file.write_text(yaml.safe_dump(told))

    def up(self, cut_off: str = "", real: bool = False, **changes: Any) -> int:
        """`cut_off`: at which method of `Launch` or `UpFolder`; `_met` is where it has a VM and waits for it.
        `real`: time passes by itself."""
        options = argparse.Namespace(home=self.path, cloud=self.cloud.name, region=None, instance_type=None)
        options = argparse.Namespace(**{**vars(options), "yes": True, **changes})
        patience = Patience(pause_s=0.2) if real else self._patience
        if not cut_off:
            return up(options, patience)
        with pytest.MonkeyPatch.context() as patch:
            owner = launching.Launch if hasattr(launching.Launch, cut_off) else UpFolder
            patch.setattr(owner, cut_off, _cut_off)
            with pytest.raises(CutOff):
                up(options, patience)
        return -1

    def down(self, cloud: str | None = None) -> int:
        options = argparse.Namespace(home=self.path, cloud=cloud, yes=True, json=False)
        return down(options, self._patience)

    @property
    def _patience(self) -> Patience:
        """Looks rarely: each look asks the stand-in."""
        return replace(self.time.patience(), pause_s=60.0, lag_pause_s=60.0)

    @property
    def record(self) -> VmRecord:
        found = self.folder.read()
        assert found is not None
        return found

    def boot_file(self, number: int = -1) -> dict[str, Any]:
        """Of the VM that was asked for so many before."""
        return json.loads(files_in(self.cloud.user_data()[number])["/etc/makara-manager/boot.json"])


def _nobody(host: str, *_: object) -> None:
    raise NobodyThere(f"{host}: a VM of tests")


def _cut_off(*_: object) -> None:
    raise CutOff
