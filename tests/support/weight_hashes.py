"""The hash of an export (`makara.checkpoint.weights_sha256`) of tensors that were never exported."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from makara.checkpoint.export import WeightsHash
from makara.checkpoint.safetensors_header import parse_header
from makara.checkpoint.tensors import pack


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """That of an export with these tensors."""
    data = pack(tensors)
    header = parse_header(data, "tensors")
    digest = WeightsHash()
    for name in sorted(header.tensors):
        entry = header.tensors[name]
        digest.add(entry, (data[entry.start : entry.stop],))
    return digest.hexdigest()


def state_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """That of an export of this state of all sections, of which weights and buffers are exported."""
    kept = {name: tensor for name, tensor in state.items() if name.startswith(("weights/", "buffers/"))}
    return tensors_sha256({name.split("/", 1)[1]: tensor for name, tensor in kept.items()})
