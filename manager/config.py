"""The settings that a manager process is started with; all other state is in its journal."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..checkpoint import StoreUri
from ..protocol.archives import DEFAULT, BundleBounds
from .home import DEFAULT_BUNDLE_BYTES, DEFAULT_PORT, ConfigError, is_loopback
from .spec.store_uri import AWS, AZURE, EVERY_FOLDER, entry_faults

_MOST_COMPRESSED = 8  # a bundle may unpack to so many times its size, if that is more than the default


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one manager. Raises `ConfigError` if two of them contradict each other."""

    home: Path
    """Folder of everything that outlives the process: journal, tokens, bundles, local VMs."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback needs `allow_remote`."""
    port: int = DEFAULT_PORT
    """TCP port; 0 is any free one, kept over restarts so that agents can reconnect."""
    allow_remote: bool = False
    """Listen beyond this machine. Every request needs a token either way."""
    tls: bool | None = None
    """Serve TLS with the authority of this home; None: if listening beyond loopback or using clouds."""
    public_url: str | None = None
    """The URL by which agents reach this manager; None: the address it listens on."""
    local_vms: bool | None = None
    """Whether to offer `provider: local` to administrators' jobs, whose code then runs on this machine as
    this user; None: unless `allow_remote`."""
    names: tuple[str, ...] = ()
    """Further names and addresses of this manager, for its certificate."""
    heartbeat_s: float = 1.0
    """How often an agent reports when nothing changes."""
    heartbeats_per_s: float = 250.0
    """Target for one job: agents of larger jobs report less often, but four times in a VM's lease."""
    tick_s: float = 0.25
    """How often the core gets a tick, and how often this machine is checked for dead VMs."""
    allow_stores: tuple[str, ...] | None = None
    """Stores that the manager's own credentials may sign for, and folders that jobs may use:
    `s3://[bucket[/prefix]]` at AWS, `az://` (Azure), `http(s)://host[:port][/bucket[/prefix]]`,
    `file:///folder`. None: AWS and Azure; on loopback administrators' jobs may also use folders."""
    rest_factor: float = 100.0
    """A job's reports and ticks are gathered for this many times the duration of its last decision."""
    longest_rest_s: float = 1.0
    """The longest time for which they are gathered."""
    slow_call_s: float = 30.0
    """A call of a provider or a store that takes longer is shown as trouble."""
    cloud_list_s: float = 15.0
    """How often a cloud's VMs are listed, for all jobs together; more rarely while it has none."""
    cloud_check_s: float = 45.0
    """How long a submission waits for the clouds' answers; the command line waits for 60 s in all."""
    close_timeout_s: float = 10.0
    """How long a manager that ends waits for its journal."""
    max_bundle_bytes: int = DEFAULT_BUNDLE_BYTES
    """Largest code bundle that a submission may carry."""
    max_report_bytes: int = 16 * 1024 * 1024
    """Largest report of an agent, which is told this and splits larger ones."""
    store_patience_s: float = 600.0
    """How long a store may refuse to open a head or take an export before the job waits for a person."""
    bounds: tuple[str, ...] = ()
    """`NAME=VALUE` for bounds of the core (`Timing`), of agents (`Leases`) and of this class."""
    agent_command: tuple[str, ...] | None = None
    """Local provider: the command to which a VM's boot file is appended; None: this Python,
    `-m makara.worker.agent`."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not in 0..65535")
        if not is_loopback(self.host) and not self.allow_remote:
            raise ConfigError(
                f"host: {self.host!r} is reachable from other machines; expected a loopback address, "
                "or --allow-remote as well"
            )
        if self.tls is False and not is_loopback(self.host):
            raise ConfigError(
                f"tls: plain HTTP on {self.host!r} would show tokens to all on the way; "
                "leave --no-tls out, or listen on loopback behind a proxy that ends TLS"
            )
        if self.public_url is not None:
            _check_public_url(self.public_url)
        if self.max_bundle_bytes < 1:
            raise ConfigError(
                f"max_bundle_bytes: {self.max_bundle_bytes} is no size; expected 1 byte or more"
            )
        for fault in entry_faults(self.stores):
            raise ConfigError(f"allow_stores: {fault}")

    @property
    def offers_local(self) -> bool:
        """`local_vms`, or its default."""
        return not self.allow_remote if self.local_vms is None else self.local_vms

    @property
    def stores(self) -> tuple[str, ...]:
        """`allow_stores`, or its default."""
        if self.allow_stores is not None:
            return self.allow_stores
        return (AWS, AZURE) if self.allow_remote else (AWS, AZURE, EVERY_FOLDER)

    def stores_for(self, owner: str | None) -> tuple[str, ...]:
        """`stores` for jobs of this owner (None: the administrators).

        The manager reads and writes folders with its own rights. So a user's job may use those that the
        administrator named, except one that would show it the home, with the admin token.
        """
        if owner is None:
            return self.stores
        return tuple(entry for entry in self.allow_stores or (AWS, AZURE) if not self._shows_home(entry))

    def _shows_home(self, entry: str) -> bool:
        folder, home = StoreUri.of(entry).folder, self.home.resolve()
        return folder is not None and (
            home.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(home)
        )

    @property
    def public_host(self) -> str | None:
        """The host of `public_url`."""
        return urlsplit(self.public_url).hostname if self.public_url is not None else None

    @property
    def bundle_bounds(self) -> BundleBounds:
        """How much a bundle may unpack to."""
        unpacked_bytes = max(DEFAULT.unpacked_bytes, _MOST_COMPRESSED * self.max_bundle_bytes)
        return replace(DEFAULT, unpacked_bytes=unpacked_bytes)

    @property
    def journal_path(self) -> Path:
        return self.home / "journal.sqlite3"

    @property
    def server_file(self) -> Path:
        """The file with a running manager's URL, process id and bounds: `{"url": ..., "pid": ...}`."""
        return self.home / "server.json"

    @property
    def admin_token_file(self) -> Path:
        return self.home / "admin.token"


def _check_public_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"public_url: {url!r} is no URL: {error}") from error
    if scheme not in ("http", "https") or not host:
        raise ConfigError(f"public_url: {url!r} is no URL of a manager; expected https://host[:port]")
    if scheme == "http" and not is_loopback(host):
        raise ConfigError(f"public_url: {url!r} is plain HTTP beyond loopback; expected https://...")


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, atomically and durably, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
