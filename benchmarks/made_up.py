"""A made-up model on made-up machines, for benchmarks that only plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from makara.pipeline import Range
from makara.simulator import Calibration, Link


def model(forward_s: Sequence[float], *, jitter_s: float = 0.0) -> Calibration:
    """One section for each forward; a backward takes twice as long. 4 MB across each cut, 10 Gbit/s."""
    sections = len(forward_s)
    link = Link(latency_s=1e-4, bytes_per_s=1.25e9, jitter_s=jitter_s)
    return Calibration(
        forward_s=tuple(forward_s),
        backward_s=tuple(2 * seconds for seconds in forward_s),
        optimizer_s=(0.001,) * sections,
        parameter_bytes=(50 << 20,) * sections,
        gradient_bytes=(50 << 20,) * sections,
        state_bytes=(200 << 20,) * sections,
        activation_bytes=(100 << 20,) * sections,
        cut_bytes=(4 << 20,) * (sections - 1),
        grad_cut_bytes=(4 << 20,) * (sections - 1),
        inter_vm=link,
        intra_vm=link,
        device_kind="cuda",
        microbatch_size=1,
    )


def in_halves(calibration: Calibration) -> Calibration:
    """With an I and a W that take half of the backward each."""
    half = tuple(seconds / 2 for seconds in calibration.backward_s)
    return replace(calibration, input_s=half, weight_s=half)


def stages(sections: int, depth: int) -> list[Range]:
    """P stages whose sizes differ by at most one section."""
    return [Range(n * sections // depth, (n + 1) * sections // depth) for n in range(depth)]
