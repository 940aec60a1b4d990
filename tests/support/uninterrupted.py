"""The run that a job would have had if nothing had happened, in this process."""

from __future__ import annotations

from makara.model.partition.partition import choose_cuts
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.protocol.messages import JobSettings
from reference import native_device, run_reference
from torch import Tensor


def uninterrupted(training: Training, job: JobSettings, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, state) after so many steps. The job says its m and its sections."""
    assert job.microbatch_size is not None, "the reference measures nothing"
    traced = trace(training, job.microbatch_size, job.seed)
    return run_reference(
        training,
        microbatch_size=job.microbatch_size,
        num_micro_batches=job.global_batch_size // job.microbatch_size,
        cuts=choose_cuts(traced, job.num_sections),
        steps=steps,
        seed=job.seed,
        numerics=job.numerics,
        device=native_device(),
    )
