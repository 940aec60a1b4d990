"""Runs a manager process: its home, its port, and its shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from ..simulator import warm_up
from .api.app import create_app
from .authority import Authority, is_wildcard, names_of
from .boot.user_data import render
from .bounds import bounds_of, defaults, differing, told, with_bounds
from .clock import SteadyClock
from .collector import rare_collections
from .config import ServerConfig, write_private
from .connections import Connections, allow_files
from .home import ConfigError, is_loopback
from .http_server import Server
from .providers.opening import open_providers
from .providers.settings import FILE as CLOUDS
from .providers.settings import read_settings
from .service.journal import SqliteJournal
from .service.planning import Choose, compute_plan
from .service.service import Service
from .service.tokens import TokenStore

log = logging.getLogger("makara.manager")

_QUIET_S = 20.0  # by then the jobs of the previous manager are resumed


def serve(
    config: ServerConfig,
    *,
    on_ready: Callable[[str, str], None] = lambda url, token: None,
    choose_plan: Choose = compute_plan,
) -> None:
    """Run a manager until SIGINT or SIGTERM; its VMs live on. `on_ready` gets the URL and the admin token;
    for `choose_plan` see `Service`.

    Raises `JournalLocked` if another manager uses this home, `ConfigError` if the port is taken or
    `clouds.yaml` lacks a place where VMs of the journal may exist, and any error that stops the manager.
    """
    timing, config = bounds_of(config.bounds), with_bounds(config)
    os.umask(0o077)
    config.home.mkdir(parents=True, exist_ok=True)
    journal = SqliteJournal(config.journal_path)
    listener = _listen(config)
    port = int(listener.getsockname()[1])
    authority = _authority(config)
    url = f"{'http' if authority is None else 'https'}://{_local(config.host)}:{port}"
    clock = SteadyClock()
    tokens = TokenStore(config.home / "tokens.sqlite3", clock)
    providers = open_providers(config, tokens.identity, render, clock)
    try:
        admin_token = tokens.ensure_admin(config.admin_token_file)
        service = Service(
            config,
            journal,
            tokens,
            providers,
            timing=timing,
            clock=clock,
            clouds=read_settings(config.home),
            choose_plan=choose_plan,
        )
        service.manager_url = config.public_url or url
        service.manager_ca = authority.certificate if authority is not None else None
        bounds = _tell_bounds(config)
        record = {"url": url, "port": port, "pid": os.getpid(), "bounds": bounds}
        write_private(config.server_file, json.dumps(record).encode())
        on_ready(url, admin_token)
        asyncio.run(run(service, listener, authority))
    finally:
        listener.close()
        for provider in providers.values():
            provider.close()
        tokens.close()
        journal.close()


async def run(service: Service, listener: socket.socket, authority: Authority | None = None) -> None:
    """Serve until told to end, or until the manager must stop; over TLS if an `authority` is given."""
    server = Server(
        create_app(service),
        Connections(allow_files()),
        ws_max_size=service.config.max_report_bytes,
        ssl_context_factory=authority.offered if authority is not None else None,
    )
    compiling = asyncio.get_running_loop().call_later(_QUIET_S, warm_up)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    failing = asyncio.create_task(service.failed())
    renewing = asyncio.create_task(authority.keep_renewed()) if authority is not None else None
    try:
        with rare_collections():
            await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
        if failing.done():
            failing.result()
    finally:
        failing.cancel()
        compiling.cancel()
        if renewing is not None:
            renewing.cancel()


def _authority(config: ServerConfig) -> Authority | None:
    """The authority for TLS, or None for plain HTTP; by default TLS if other machines reach the manager."""
    reached = not is_loopback(config.host) or (config.home / CLOUDS).exists()
    if not (reached if config.tls is None else config.tls):
        return None
    return Authority(config.home, names_of(config.host, config.public_host) | set(config.names))


def _listen(config: ServerConfig) -> socket.socket:
    """Open the listening socket. With port 0, take this home's last port if it is free: agents know it."""
    ports = [config.port] if config.port else [*_earlier_port(config), 0]
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host.strip("[]"), port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if port == ports[-1]:
                raise ConfigError(f"port: cannot listen on {config.host}:{port}: {error}") from error
    raise AssertionError("the last port either listens or raises")


def _tell_bounds(config: ServerConfig) -> dict[str, float]:
    """Log bounds that differ from their defaults, and those that the previous manager had set; return the
    former."""
    bounds = differing(config.bounds)
    if bounds:
        log.info("bounds: %s", told(bounds))
    known, before = defaults(), _earlier(config).get("bounds", {})
    for name in before.keys() & known.keys() - bounds.keys():
        log.warning("bound %s is %g; the manager before had %g", name, known[name], before[name])
    return bounds


def _earlier_port(config: ServerConfig) -> list[int]:
    record = _earlier(config)
    return [int(record["port"])] if record else []


def _earlier(config: ServerConfig) -> dict[str, Any]:
    """The server file of the previous manager."""
    try:
        return json.loads(config.server_file.read_bytes())
    except FileNotFoundError:
        return {}


def _local(host: str) -> str:
    """`host` as it is written in a URL for this machine."""
    if is_wildcard(host):
        return "[::1]" if ":" in host else "127.0.0.1"
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
