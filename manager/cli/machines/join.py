"""`makara join`: checks its options, and replaces this process by the machine's."""

from __future__ import annotations

import argparse
import math
import os
import ssl
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from ...home import ConfigError, is_loopback


def join(options: argparse.Namespace) -> NoReturn:
    """Run the command. Raises `ConfigError`."""
    folder: Path = (options.folder or options.home / "machine").expanduser().resolve()
    url = _checked(options.url)
    command = [sys.executable, "-P", "-m", "makara.worker.machine", url, "--folder", str(folder)]
    if options.token_file is not None:
        command += ["--token-file", str(_readable(options.token_file))]
    elif not (folder / "manager.id").exists():
        raise ConfigError("--token-file: needed until this machine has joined; see `makara token add --join`")
    if options.ca_file is not None:
        command += ["--ca-file", str(_certificates(options.ca_file))]
    if options.name is not None:
        command += ["--name", options.name]
    if options.address is not None:
        command += ["--address", options.address]
    if options.grace is not None:
        if not 0 <= options.grace < math.inf:
            raise ConfigError(f"--grace: {options.grace:g} is no time; expected seconds, 0 or more")
        command += ["--grace", str(options.grace)]
    for line in token_warnings(options.home):
        print(line, file=sys.stderr, flush=True)
    os.execv(command[0], command)


def token_warnings(home: Path) -> list[str]:
    """What jobs' code, which runs as this user, could take from this user's `home`."""
    tokens = [home / "admin.token", home / "up" / "admin.token"]
    return [
        f"warning: jobs' code runs as this user here, and can read {token}: whose jobs run here can become "
        "its administrator. Run `makara join` as another user"
        for token in tokens
        if os.access(token, os.R_OK)
    ]


def _checked(url: str) -> str:
    parts = urlsplit(url)
    try:
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(f"url: {url!r} is no address of a manager; expected https://host:port")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"url: {url!r} is plain HTTP, on which tokens and code can be read on their way; "
            "expected https://"
        )
    return url.rstrip("/")


def _certificates(path: Path) -> Path:
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # `SSLError` is one
        raise ConfigError(f"--ca-file: cannot read certificates from {path}: {error}") from error
    return path.resolve()


def _readable(path: Path) -> Path:
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file: cannot read {path}: {error}") from error
    if "." not in text or len(text.split()) != 1:
        raise ConfigError(f"--token-file: {path} holds no token, as `makara token add --join` prints it")
    return path.resolve()
