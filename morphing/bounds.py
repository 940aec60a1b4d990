"""The least time that a step can take under a plan, whatever its order: what need not be simulated."""

from __future__ import annotations

from collections.abc import Sequence

from ..pipeline import Range
from ..simulator import COMMIT_BYTES, Calibration
from .balance import stage_seconds


def least_seconds(
    calibration: Calibration,
    stages: Sequence[Range],
    replicas: int,
    num_micro_batches: int,
    *,
    recompute: bool,
    slowdown: float,
) -> float:
    """A lower bound of `simulate(...).time_s` of a grid none of whose workers is faster than `slowdown`.

    A stage cannot begin before the first micro-batch has come to it, does all its work, and its last backward
    has to go back through the stages before it; then come what sums are left, the commit and the optimizer.
    The sums of a stage come one after the other when all its replicas have done all their forwards.
    """
    fullest = -(-num_micro_batches // replicas)
    whole_s = sums_s = lead_s = tail_s = 0.0
    for span in stages:
        work_s = slowdown * stage_seconds(calibration, span, recompute=recompute) * fullest
        whole_s = max(whole_s, lead_s + work_s + tail_s)
        forward_s = slowdown * sum(calibration.forward_s[span.start : span.stop])
        if span.stop == calibration.num_sections:
            tallied_s = lead_s + forward_s * fullest
            break
        lead_s += forward_s + _message_s(calibration, calibration.cut_bytes[span.stop - 1])
        backward_s = slowdown * sum(calibration.backward_s[span.start : span.stop])
        tail_s += backward_s + _message_s(calibration, calibration.grad_cut_bytes[span.stop - 1])
    else:
        raise AssertionError("the stages tile all sections")
    for span in stages:
        own = calibration.gradient_bytes[span.start : span.stop]
        sums_s = max(sums_s, sum(_ring_s(calibration, size_bytes, replicas) for size_bytes in own))
    whole_s += _ring_s(calibration, calibration.gradient_bytes[0], replicas)
    commit_s = _ring_s(calibration, COMMIT_BYTES, len(stages) * replicas)
    optimizer_s = max(sum(calibration.optimizer_s[span.start : span.stop]) for span in stages)
    return max(whole_s, tallied_s + sums_s) + commit_s + slowdown * optimizer_s


def _message_s(calibration: Calibration, size_bytes: int) -> float:
    links = (calibration.inter_vm, calibration.intra_vm)
    return min(link.latency_s + link.occupied_s(size_bytes) for link in links)


def _ring_s(calibration: Calibration, size_bytes: int, ring: int) -> float:
    links = (calibration.inter_vm, calibration.intra_vm)
    return min(link.allreduce_s(size_bytes, ring) for link in links)
