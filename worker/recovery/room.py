"""How much memory a member has while a generation forms.

Until all members have what they need, each holds what it held before and what it receives: sections that it
lacks, sums of buckets that it did not sum, and others' partial sums of the step in flight beside its own. One
that is short of memory drops partial sums before it shows them, and is sent no more than it has room for: it
costs less to do some of a step again than a trainer that dies for want of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...protocol.gpus import usable_bytes
from ...protocol.messages import JobSettings
from ..execution.buckets import Bucket
from ..execution.state import ModelState
from ..memory_watch import available_bytes

_ADAM = 3.0  # bytes of state for each of weights: they and two moments


def free_bytes(device: torch.device, job: JobSettings) -> float:
    """Bytes of memory that a worker may still take. On the CPU its workers share what the machine has."""
    if device.type != "cuda":
        return available_bytes() / job.workers_per_node
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    limit = usable_bytes(torch.cuda.get_device_properties(device).total_memory)
    if job.device_memory_bytes is not None:
        limit = min(limit, job.device_memory_bytes)
    return min(torch.cuda.mem_get_info(device)[0] + cached, limit - allocated)


def lacking_bytes(state: ModelState, wanted: Sequence[int], own: Sequence[Bucket]) -> float:
    """Bytes that a member takes until a generation has formed, besides partial sums that it is sent.

    `wanted`: sections that it must hold; `own`: buckets that it will sum. The state of a section that it
    lacks is taken to be as large, for each byte of parameters, as those that it holds, or as with Adam. With
    the optimizer on the host, the device holds the weights alone.
    """
    sections, held = state.runtime.chain.sections, state.runtime.sections
    sizes = {name: tensor.nbytes for name, tensor in state.runtime.chain.traced.tensors.items()}
    held_bytes = sum(tensor.nbytes for section in held.values() for tensor in section.state()[0].values())
    weights = sum(_parameter_bytes(sizes, sections[index].parameters) for index in held)
    ratio = held_bytes / weights if weights else _ADAM
    if state.runtime.optimizer_on_host:
        ratio = 1.0
    lacking = [index for index in wanted if index not in held]
    summed = state.in_flight.parcels.sums()
    return ratio * sum(_parameter_bytes(sizes, sections[index].parameters) for index in lacking) + sum(
        state.in_flight.size_of(bucket) for bucket in own if bucket.sections not in summed
    )


def most_copied(state: ModelState, own: Sequence[Bucket]) -> int:
    """Bytes that receiving a partial sum takes, at most, beside the sum itself: as a message, and as it is
    read. They are the host's, and count where the sums are there too."""
    if state.runtime.device.type == "cuda":
        return 0
    return 2 * max((state.in_flight.size_of(bucket) for bucket in own), default=0)


def _parameter_bytes(sizes: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(sizes[name] for name in names)
