"""Calibrations for tests."""

from __future__ import annotations

from typing import Any

from makara.simulator import Calibration, Link

FREE = Link(latency_s=0.0, bytes_per_s=1e18)


def uniform(num_sections: int, **change: Any) -> Calibration:
    """F = 1 s, B = 2 s, links without cost, ten bytes of activations and a hundred of state a section."""
    values: dict[str, Any] = {
        "forward_s": (1.0,) * num_sections,
        "backward_s": (2.0,) * num_sections,
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
