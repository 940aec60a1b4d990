"""Checks that a type of VM is large enough for a job's workers."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.job_spec import Resources


def size_faults(
    name: str,
    resources: Resources,
    *,
    num_cpus: int,
    memory_bytes: int,
    num_gpus: int,
    gpu_memory_bytes: int | None,
) -> Iterator[tuple[str, str]]:
    """Yield faults as (field of `resources`, message). `gpu_memory_bytes`: of each GPU; None: unknown."""
    workers = resources.workers_per_node
    if num_gpus and workers > num_gpus:
        yield "instance_type", f"{name} has {num_gpus} GPUs, fewer than workers_per_node ({workers})"
    threads = workers * resources.threads
    if not num_gpus and threads > num_cpus:
        yield "instance_type", f"{name} has {num_cpus} vCPUs; workers_per_node times threads is {threads}"
    has = gpu_memory_bytes if num_gpus else memory_bytes // workers
    wanted = resources.device_memory
    if wanted is not None and has is not None and wanted > has:
        yield "instance_type", f"{name} has {has >> 20} MiB for a worker, fewer than device_memory"
