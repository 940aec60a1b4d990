"""The run that a job would have had if nothing had happened, in this process."""

from __future__ import annotations

from makara.worker.cutting.partition import choose_cuts
from makara.worker.messages import JobSettings
from makara.worker.reference import run_reference
from makara.worker.tracing.trace import trace
from makara.worker.training import Training
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
    )
