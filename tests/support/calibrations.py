"""Calibrations for tests."""

from __future__ import annotations

from typing import Any

from makara.simulator import Calibration, Link
from makara.simulator.calibration.measurements import Basis, Measurements, Row, times_of
from makara.simulator.calibration.statistics import Figure

FREE = Link(latency_s=0.0, bytes_per_s=1e18)


def uniform(num_sections: int, **change: Any) -> Calibration:
    """F = 1 s, B = 2 s, I = W = 1 s, links without cost, ten bytes of activations and a hundred of state a
    section."""
    values: dict[str, Any] = {
        "forward_s": (1.0,) * num_sections,
        "backward_s": (2.0,) * num_sections,
        "input_s": (1.0,) * num_sections,
        "weight_s": (1.0,) * num_sections,
        "optimizer_s": (0.5,) * num_sections,
        "parameter_bytes": (25,) * num_sections,
        "gradient_bytes": (50,) * num_sections,
        "state_bytes": (100,) * num_sections,
        "activation_bytes": (10,) * num_sections,
        "cut_bytes": (4,) * (num_sections - 1),
        "grad_cut_bytes": (3,) * (num_sections - 1),
        "inter_vm": FREE,
        "intra_vm": FREE,
        "device_kind": "cpu",
        "microbatch_size": 2,
        "versions": {"torch": "2.13"},
    }
    return Calibration(**(values | change))


def frozen_beginning(num_sections: int, frozen: int) -> dict[str, tuple[int, ...]]:
    """What `uniform` takes so that the first sections get no gradient."""
    return {
        "gradient_bytes": (0,) * frozen + (50,) * (num_sections - frozen),
        "grad_cut_bytes": (0,) * frozen + (3,) * (num_sections - 1 - frozen),
    }


def measured(calibration: Calibration, graph_hash: str) -> Measurements:
    """Measurements that hold this calibration alone, of cuts before positions 1, 2, ..."""
    figures = {
        name: tuple(Figure(v, v / 10, 9, 1) for v in getattr(calibration, name))
        for name in times_of(calibration)
    }
    cuts = tuple(range(1, calibration.num_sections))
    row = Row(calibration=calibration, graph_hash=graph_hash, cuts=cuts, figures=figures)
    basis = Basis(
        graph_hash=graph_hash,
        microbatch_size=calibration.microbatch_size,
        global_batch_size=64,
        num_sections=0,
        code_sha256="c0de",
        precision="fp32",
        numerics="exact",
        threads=1,
        device_kind=calibration.device_kind,
        device_name="a processor, 2 cores",
        torch_version="2.13",
        makara_version="0.1.0",
    )
    return Measurements(basis=basis, rows=(row,), seconds=2.5)
