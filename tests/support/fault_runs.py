"""One fault after another in a scene: what is waited for, what is asserted, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty_model
from fault_scene import BATCH, SHAPE, Noticed, Scene
from fault_signs import Played
from faults import Fault
from makara.checkpoint import load_manifest, open_store, read_parts
from makara.checkpoint.tensors import unpack
from makara.protocol.messages import CheckpointRef
from rich.console import Console
from rich.table import Table
from service_process import wait_for
from trainer_processes import settings
from uninterrupted import uninterrupted
from weight_hashes import tensors_sha256

Row = dict[str, Any]
SLACK = 3.0
"""Of a bound, on a machine whose processors others use as well."""
_FILE_WIDTH = 180


def play(scene: Scene, fault: Fault) -> Row:
    """Do the harm once, and see it noticed within its bound, and steps go on before it is over."""
    scene.wait_steady()
    scene.mark()
    with fault.play(scene) as played:
        noticed = _wait_noticed(scene, fault.name, played)
        played.then()
        resumed = _wait_step(scene, max(played.at, noticed.at))
    row: Row = {
        "fault": fault.name,
        "noticed by": noticed.by,
        "noticed after s": noticed.at - played.at,
        "bound s": played.bound_s,
        "next step after s": resumed - played.at,
        "exact": False,
    }
    assert row["noticed after s"] <= SLACK * played.bound_s, row
    return row


def _wait_noticed(scene: Scene, name: str, played: Played) -> Noticed:
    found: list[Noticed] = []

    def noticed() -> bool:
        sign = played.sign(scene)
        found.extend([sign] if sign is not None else [])
        return sign is not None

    wait_for(noticed, f"{name} to be noticed", scene.service.logs)
    return found[0]


def _wait_step(scene: Scene, at: float) -> float:
    wait_for(lambda: scene.step_after(at) is not None, "a step after the fault", scene.service.logs)
    step = scene.step_after(at)
    assert step is not None
    return step


def compare(scene: Scene) -> None:
    """Stop the job: every loss and all that its last checkpoint holds are those of the uninterrupted run."""
    service = scene.service
    service.client.post(f"/jobs/{scene.job}/stop")
    view = service.wait_status(scene.job, "stopped")
    job = settings(Path("/unused"), **BATCH, **SHAPE, numerics="exact")
    losses, state = uninterrupted(faulty_model.build(), job, view["step"])
    assert service.losses(scene.job) == {number: loss for number, loss in enumerate(losses, 1)}
    assert tensors_sha256(_stored(scene, view)) == tensors_sha256(state)


def _stored(scene: Scene, view: dict[str, Any]) -> dict[str, Any]:
    """Everything that the newest checkpoint holds: weights, optimizer, scales, buffers."""
    newest = view["checkpoints"][0]
    assert newest["step"] == view["step"]
    store = open_store(scene.store.uri("faults"), endpoint=scene.store.endpoint, region=scene.store.region)
    checkpoint = CheckpointRef(step=newest["step"], generation=newest["generation"])
    files = read_parts(store, load_manifest(store, scene.job, checkpoint).parts)
    return {name: tensor for data in files.values() for name, tensor in unpack(data)[0].items()}


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    if not rows:
        return
    table = Table(*rows[0], title="faults in a running job", title_justify="left")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    console.print()
    console.print(table)
