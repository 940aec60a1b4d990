"""`makara server`: a manager on this machine."""

from __future__ import annotations

import argparse

from ..config import ServerConfig
from ..log_limit import log_to_stderr
from ..server import serve


def server(options: argparse.Namespace) -> int:
    """Serve until told to end."""
    config = ServerConfig(
        home=options.home.expanduser().resolve(),
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        tls=options.tls,
        public_url=options.public_url,
        local_vms=options.local,
        names=tuple(options.name),
        bounds=tuple(options.bound),
        allow_stores=tuple(options.allow_store) if options.allow_store is not None else None,
        max_bundle_bytes=options.max_bundle,
    )
    log_to_stderr()

    def ready(url: str, _: str) -> None:
        print(f"manager at {url}   status page: the same address", flush=True)
        print(f"admin token in {config.admin_token_file}", flush=True)
        print(f"checkpoints go to {', '.join(config.stores)}, or where a job has keys of its own", flush=True)

    serve(config, on_ready=ready)
    return 0
