"""What test files share: the three kinds of checkpoint store, stand-ins of clouds, and no deadlines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: tests and their processes share the cores, a thread each
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of processes: see pytest_collection_finish

import pytest
from azurite_server import AzuriteServer
from hypothesis import settings
from makara.checkpoint import Store, open_store
from makara.checkpoint.stores.credentials import AZURE_CREDENTIALS, AZURE_IDENTITY
from s3_server import S3Server
from warm_programs import WarmPopen

if TYPE_CHECKING:
    from aws_stand import AwsStand
    from azure_stand import AzureCloud

settings.register_profile("makara", deadline=None)  # no test asserts on wall-clock time
settings.load_profile("makara")


def pytest_collection() -> None:
    """Nearly all that imports and collection make stays: looking for garbage took a third of the time."""
    gc.disable()


@pytest.hookimpl(trylast=True)  # after the tests that a run leaves out were taken away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow tests, so that at the end none waits for the last of
    them."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    bounds = [len(rest) * worker // num_workers for worker in range(num_workers + 1)]
    items.clear()
    for worker, (start, stop) in enumerate(pairwise(bounds)):
        items += slow[worker::num_workers] + rest[start:stop]


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it again. It was compiled into files
    for the next run; modules that a test writes are not, as it may write them twice within a second."""
    sys.dont_write_bytecode = True
    subprocess.Popen = WarmPopen
    gc.collect()
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class StoreAddress:
    """What `open_store` takes."""

    uri: str
    endpoint: str | None = None
    region: str | None = None

    def open(self) -> Store:
        return open_store(self.uri, endpoint=self.endpoint, region=self.region)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server, its credentials in the environment. A test that stops it starts it again."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    """A running Azurite, its key in the environment. A test that stops it starts it again."""
    server = AzuriteServer(tmp_path_factory.mktemp("azurite"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [*AZURE_CREDENTIALS, *AZURE_IDENTITY]:
            patch.delenv(name, raising=False)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.start()
        yield server
        server.stop()


@pytest.fixture(params=["local", "s3", "azurite"])
def store_address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store of each kind."""
    if request.param == "local":
        return StoreAddress((tmp_path / "store").as_uri())
    if request.param == "azurite":
        azurite: AzuriteServer = request.getfixturevalue("azurite")
        return StoreAddress(azurite.uri(uuid.uuid4().hex), azurite.endpoint)
    server: S3Server = request.getfixturevalue("s3_server")
    return StoreAddress(server.uri(uuid.uuid4().hex), server.endpoint, server.region)


@pytest.fixture
def store(store_address: StoreAddress) -> Store:
    return store_address.open()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[AwsStand]:
    from aws_stand import aws_stand  # here, as only some tests need it: it takes a second to import

    with aws_stand(tmp_path) as opened:
        yield opened


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[AzureCloud]:
    from azure_stand import azure_cloud  # likewise

    with azure_cloud(tmp_path) as opened:
        yield opened
