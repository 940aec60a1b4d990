"""A job's first look at its model: micro-batch size, cuts, and the times that plans are simulated with."""

from __future__ import annotations

import torch

from .calibrate import calibrate, choose_microbatch_size
from .cutting.partition import choose_cuts, split
from .cutting.prices import measured_prices
from .cutting.work import compute_nodes
from .errors import UserCodeError
from .messages import JobSettings, Profile, Recipe
from .model import pick_device
from .sections.ranges import configure_torch
from .tracing.trace import TracedModel, trace
from .training import Training


def profile(training: Training, job: JobSettings) -> Profile:
    """The recipe's model part and this hardware's calibration (Varuna §4.3).

    Raises `UntraceableModel`, `UserCodeError` naming what of the job cannot be met.
    """
    device_kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = pick_device(device_kind)
    configure_torch(job.threads, job.numerics)
    m = job.microbatch_size or choose_microbatch_size(
        training, job.global_batch_size, seed=job.seed, precision=job.precision, device=device
    )
    traced = trace(training, m, job.seed, job.precision)
    prices = None if training.cuts is not None else _prices(traced, device)
    try:
        cuts = choose_cuts(traced, job.num_sections, marks=training.cuts, work=prices)
    except ValueError as error:
        raise UserCodeError(f"parallelism.{error}") from error
    num_micro_batches = job.global_batch_size // m
    recipe = Recipe(
        microbatch_size=m,
        num_micro_batches=num_micro_batches,
        cuts=cuts,
        graph_hash=traced.graph_hash,
        threads=job.threads,
        device_kind=device_kind,
        torch_version=torch.__version__,
        bundle_sha256=job.bundle_sha256,
    )
    calibration = calibrate(
        split(traced, cuts),
        training,
        seed=job.seed,
        numerics=job.numerics,
        num_micro_batches=num_micro_batches,
        device=device,
    )
    return Profile(recipe=recipe, calibration=calibration.to_json())


def _prices(traced: TracedModel, device: torch.device) -> list[float] | None:
    memory_bytes = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 30
    nodes = compute_nodes(traced.graph)
    return measured_prices(nodes, device, precision=traced.precision, memory_bytes=memory_bytes)
