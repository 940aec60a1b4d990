"""The benchmark of a manager with many VMs, at a small size."""

from __future__ import annotations

from benchmarks import manager


def test_the_benchmark_of_a_manager_runs_and_hears_every_agent() -> None:
    """Found: it named VMs by what a cloud lists of them, and nobody ran it."""
    small = manager.Setting(live=20, ever=60, step_s=0.5, watched_s=1.0, settled_s=0.5)
    found = {str(row["what"]): row["found"] for row in manager.rows([small])}
    assert found["heartbeats, and a step in 0.5 s: beats and reports heard in a second"]
    assert found["the same, MB"]
