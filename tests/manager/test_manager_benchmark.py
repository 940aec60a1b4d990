"""The benchmark of a manager with many VMs, at a small size."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import manager


def test_the_benchmark_of_a_manager_runs_and_hears_every_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: it named VMs by what a cloud lists of them, and nobody ran it."""
    small: dict[str, Any] = {
        "LIVE": 20,
        "EVER": 60,
        "STEP_S": 0.5,
        "WATCHED_S": 1.0,
        "_SETTLED_S": 0.5,
        "_RECIPE": manager._RECIPE.model_copy(update={"num_micro_batches": 20}),  # pyright: ignore[reportPrivateUsage]
        "SPEC": {
            **manager.SPEC,
            "resources": {"provider": "local", "max_nodes": 20},
            "training": {"global_batch_size": 20, "steps": 10**9},
        },
    }
    for name, value in small.items():
        monkeypatch.setattr(manager, name, value)
    found = {str(row["what"]): row["found"] for row in manager.rows()}
    assert found["heartbeats, and a step in 0.5 s: beats and reports heard in a second"]
    assert found["the same, MB"]
