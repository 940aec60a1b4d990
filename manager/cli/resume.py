"""`makara resume` and `export`: continue a job from its checkpoints, or export them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...checkpoint import CREDENTIALS, CheckpointError, Export, fetch_export, open_store
from ..spec.job_spec import JobSpecError
from .client import connect
from .progress import how_it_goes_on

_OTHER_KINDS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".npz")
_CHANGES = ("min_nodes", "max_nodes", "max_hourly_cost", "budget")


def resume(options: argparse.Namespace) -> int:
    how = "from_head" if options.from_head else "restart" if options.restart else "again"
    body: dict[str, Any] = {"how": how}
    changes = {name: getattr(options, name) for name in _CHANGES}
    body |= {name: value for name, value in changes.items() if value is not None}
    with connect(options) as client:
        job = client.get(f"/jobs/{options.job}")
        ended = job["status"] in ("stopped", "failed")
        if ended and how == "again":
            body["secrets"] = values_of(job["secrets"])
        job = client.post(f"/jobs/{job['job']}/resume", json=body)
    if options.json:
        print(json.dumps(job))
    else:
        print(f"{job['job']} {how_it_goes_on(job)}" if ended else f"{job['job']} {job['status']}")
    return 0


def export(options: argparse.Namespace) -> int:
    _check_target(options.to)
    with connect(options) as client:
        job = client.get(f"/jobs/{options.job}")
        body: dict[str, Any] = {"step": options.step}
        if job["status"] in ("finished", "stopped", "failed"):
            body["secrets"] = values_of([name for name in job["secrets"] if name in CREDENTIALS])
        done = client.post(f"/jobs/{job['job']}/export", json=body, timeout=None)
    if options.to is not None:
        done["file"] = str(_fetched(done, options.to))
    if options.json:
        print(json.dumps(done))
        return 0
    print(f"step         {done['step']}\nweights      {done['uri']}\nweight hash  {done['sha256']}")
    if options.to is not None:
        print(f"copied to    {done['file']}")
    return 0


def _check_target(to: Path | None) -> None:
    """Raise `JobSpecError` for a name that looks like a file of another kind: it would become a folder."""
    if to is not None and to.suffix in _OTHER_KINDS and not to.is_dir():
        about = (
            f"{to}: weights are written as safetensors; name a folder, or a file that ends in .safetensors"
        )
        raise JobSpecError([("--to", about)])


def _fetched(done: dict[str, Any], to: Path) -> Path:
    """The export, copied from the store with the keys of this environment. Raises `JobSpecError`."""
    made = Export(done["uri"], done["sha256"], done["step"], done["num_bytes"])
    try:
        store = open_store(done["store"], endpoint=done["endpoint"], region=done["region"])
        return fetch_export(store, made, to)
    except (CheckpointError, OSError) as error:
        about = f"the weights are at {done['uri']}, and cannot be copied from here: {error}"
        raise JobSpecError([("--to", about)]) from error


def values_of(secrets: Collection[str]) -> dict[str, str]:
    """The values of these secrets in this environment. Raises `JobSpecError` naming missing ones."""
    missing = [name for name in secrets if name not in os.environ]
    if missing:
        raise JobSpecError([("secrets", f"{name} is not set in this environment") for name in missing])
    return {name: os.environ[name] for name in secrets}
