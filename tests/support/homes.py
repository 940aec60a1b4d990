"""A manager's home that knows a stand-in's account, as somebody on the same machine has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import yaml
from makara.manager.hosting.ending import Patience
from makara.manager.providers.azure import opening
from makara.manager.providers.azure.provider import AzureProvider
from makara.manager.service.tokens import TokenStore
from rented_vms import Cloud


@dataclass
class Time:
    """Passes only while somebody sleeps; each sleep may change the world."""

    now: float = 1.8e9
    slept: int = 0
    during: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        for change in list(self.during):
            change()

    def patience(self) -> Patience:
        return Patience(clock=lambda: self.now, sleep=self.sleep)


def home_of(cloud: Cloud, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A home with settings and credentials for the stand-in, and the identity of its manager of before."""
    for name, value in cloud.environment.items():
        patch.setenv(name, value)
    # `Time` passes by sleeping, and a provider's own clock does not see that: its lists are never of before.
    patch.setattr("makara.manager.providers.aws.provider._LIST_S", 0.0)
    patch.setattr(opening, "AzureProvider", partial(AzureProvider, list_s=0.0))
    folder.mkdir()
    (folder / "clouds.yaml").write_text(yaml.safe_dump({cloud.name: cloud.section()}))
    tokens = TokenStore(folder / "tokens.sqlite3")
    tokens.close()
    return folder, tokens.identity
