"""Copies a worker's share of a checkpoint, so that training continues while it is written.

All hosts of a section hold the same state, so each stores a part of it (Varuna §4.5). A parameter that
several sections use is stored once, by the hosts of the lowest of them.
"""

from __future__ import annotations

import torch

from ...model.partition.partition import Sections
from ..execution.session import Session
from ..recovery.saver import PartSnapshot, Snapshot, share
from ..sections.state import entry_owner
from .model import Model


def take_snapshot(session: Session, model: Model, step: int) -> Snapshot:
    """Copy to host memory what this worker stores of checkpoint `step`."""
    return Snapshot(step, tuple(_part(session, model, section) for section in session.wanted))


def _part(session: Session, model: Model, section: int) -> PartSnapshot:
    tensors, scalars = model.state.runtime.sections[section].state()
    own = {name: tensor for name, tensor in tensors.items() if _stores(model.chain, section, name)}
    # Optimizers treat a state of None as absent.
    kept = {n: v for n, v in scalars.items() if v is not None and _stores(model.chain, section, n)}
    hosts = session.plan.hosts(section)
    part = hosts.index(session.rank)
    sizes = {name: tensor.nbytes for name, tensor in own.items()}
    chosen = share(sorted(own), sizes, part, len(hosts))
    return PartSnapshot(section, part, len(hosts), {name: _copy(own[name]) for name in chosen}, kept)


def _stores(chain: Sections, section: int, entry: str) -> bool:
    shared = chain.shared.get(entry_owner(entry))
    return shared is None or shared[0] == section


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
