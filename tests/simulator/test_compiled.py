"""The engine's two forms, interpreted and compiled: they change nothing but the time."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from calibrations import uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.pipeline import Plan, Range, Schedule, grid
from makara.simulator import Link, MiniBatch, simulate
from makara.simulator.backends import INTERPRETED, compiled
from makara.simulator.cluster import Cluster
from makara.simulator.pipelines import Kernels
from makara.simulator.rng import exponential, philox
from makara.simulator.simulation import simulate_with
from plans import crossing_plans, grids, stages


@pytest.fixture(scope="module")
def fast() -> Kernels:
    pytest.importorskip("numba")
    return compiled()


seconds = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 3)
sizes = st.integers(0, 9)
links = st.builds(
    Link,
    latency_s=seconds,
    bytes_per_s=st.sampled_from([1e18, 20.0, 3.0]),
    jitter_s=st.sampled_from([0.0, 0.0, 0.7]),
)


@st.composite
def clusters(draw: st.DrawFn, plan: Plan) -> Cluster:
    """Sections, links and workers of any kind."""
    num_sections, num_workers = plan.num_sections, plan.num_workers

    def each(
        values: st.SearchStrategy[int] | st.SearchStrategy[float], count: int
    ) -> tuple[int | float, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    calibration = uniform(
        num_sections,
        forward_s=each(seconds, num_sections),
        backward_s=each(seconds, num_sections),
        activation_bytes=each(sizes, num_sections),
        cut_bytes=each(sizes, num_sections - 1),
        gradient_bytes=(0,) * plan.frozen + (50,) * (num_sections - plan.frozen),
        grad_cut_bytes=((0,) * plan.frozen + each(sizes, num_sections - 1))[: num_sections - 1],
        batch_bytes=each(sizes, num_sections),
        forward_peak_bytes=each(sizes, num_sections),
        backward_peak_bytes=each(sizes, num_sections),
        inter_vm=draw(links),
        intra_vm=draw(links),
        message_s=draw(seconds),
    )
    vm_of = [f"vm{number}" for number in each(st.integers(0, 2), num_workers)]
    return Cluster(calibration, vm_of, each(st.sampled_from([1.0, 1.0, 1.7]), num_workers))


plans = crossing_plans() | grids(max_micro_batches=40)


@given(st.data(), plans, st.integers(0, 1 << 70))
@settings(max_examples=200, deadline=None)
def test_compiled_code_does_what_its_source_does(
    fast: Kernels, data: st.DataObject, plan: Plan, seed: int
) -> None:
    cluster = data.draw(clusters(plan))
    slow = simulate_with(INTERPRETED, plan, cluster, seed=seed, timeline=True)
    assert simulate_with(fast, plan, cluster, seed=seed, timeline=True) == slow
    assert simulate_with(fast, plan, cluster, seed=seed, timeline=False) == bare(slow)


@given(st.data(), plans)
@settings(max_examples=200, deadline=None)
def test_a_timeline_changes_nothing_else(data: st.DataObject, plan: Plan) -> None:
    cluster = data.draw(clusters(plan))
    whole = simulate_with(INTERPRETED, plan, cluster, seed=0, timeline=True)
    assert simulate_with(INTERPRETED, plan, cluster, seed=0, timeline=False) == bare(whole)


@pytest.mark.parametrize("seed", range(60))
def test_it_does_so_where_stages_are_very_different(fast: Kernels, seed: int) -> None:
    draw = random.Random(seed)
    depth, replicas = draw.choice([2, 5, 12]), draw.randint(1, 4)
    plan = grid(
        stages(depth),
        replicas,
        draw.choice([replicas, 50, 701]),
        schedule=draw.choice(list(Schedule)),
        window=draw.choice([None, 2, depth]),
        recompute=draw.random() < 0.7,
        frozen=draw.choice([0, 0, depth // 2]),
    )
    latency_s, spread = draw.choice([0.0, 1e-4, 3.0]), draw.choice([0.2, 5.0, 1000.0])
    calibration = uniform(
        depth,
        forward_s=tuple(draw.choice([1e-9, 1.0]) * (1 + spread * draw.random()) for _ in range(depth)),
        backward_s=tuple(1 + spread * draw.random() for _ in range(depth)),
        cut_bytes=(4,) * (depth - 1),
        grad_cut_bytes=(5,) * (depth - 1),
        activation_bytes=(3,) * depth,
        inter_vm=Link(latency_s=latency_s, bytes_per_s=draw.choice([1e18, 3.0])),
    )
    cluster = Cluster(calibration, [f"vm{n}" for n in range(plan.num_workers)], [1.0] * plan.num_workers)
    slow = simulate_with(INTERPRETED, plan, cluster, seed=0, timeline=False)
    assert simulate_with(fast, plan, cluster, seed=0, timeline=False) == slow


@pytest.mark.parametrize("compiles", [False, True])
def test_simulations_in_several_threads_do_not_disturb_each_other(fast: Kernels, compiles: bool) -> None:
    # Static orders are used by several at once.
    kernels = fast if compiles else INTERPRETED
    plans = [grid(stages(4), 2, 61, window=window, recompute=True) for window in (None, 3, 5)]
    cluster = Cluster(uniform(4, cut_bytes=(4,) * 3), [f"vm{n}" for n in range(8)], [1.0] * 8)

    def steps(plan: Plan) -> list[MiniBatch]:
        return [simulate_with(kernels, plan, cluster, seed=0, timeline=False) for _ in range(20)]

    alone = [steps(plan)[0] for plan in plans]
    with ThreadPoolExecutor(len(plans)) as threads:
        for plan_alone, together in zip(alone, threads.map(steps, plans), strict=True):
            assert together == [plan_alone] * 20


def bare(step: MiniBatch) -> MiniBatch:
    return replace(step, timeline=(), closings=(), memory=())


def test_draws_are_those_that_were_published() -> None:
    # The known answers of Random123 for philox2x32 with ten rounds.
    assert philox(0, 0, 0) == (0xFF1DAE59, 0x6CD10DF2)
    assert philox(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF) == (0x2C3F628B, 0xAB4FD7AD)
    assert philox(0x13198A2E, 0x243F6A88, 0x85A308D3) == (0xDD7CE038, 0xF62A4C12)


def test_draws_are_exponential() -> None:
    draws = [exponential(3, 1, number, 1000) for number in range(20000)]
    assert sum(draws) / len(draws) == pytest.approx(1000, rel=0.03)
    assert sum(draw > 1000 for draw in draws) / len(draws) == pytest.approx(0.3679, abs=0.015)


def test_nothing_imports_numba_unasked() -> None:
    code = (
        "import sys, makara.manager.cli, makara.simulator, makara.morphing, makara.worker.agent\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def unwritable(tmp_path: Path) -> dict[str, str]:
    """An environment with the packages where nothing can be written beside them nor in the user's cache."""
    pytest.importorskip("numba")
    root = Path(__file__).parent.parent.parent
    for name in ("pipeline", "simulator"):
        ignored = shutil.ignore_patterns("__pycache__")
        copied = shutil.copytree(root / name, tmp_path / "makara" / name, ignore=ignored)
        copied.joinpath("__pycache__").touch()  # a file, so that nobody, not even root, can write into it
    missing = {"HOME": os.devnull, "XDG_CACHE_HOME": f"{os.devnull}/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return kept | missing | {"PYTHONPATH": str(tmp_path)}


def test_a_command_interprets_where_compiled_code_cannot_be_kept(unwritable: dict[str, str]) -> None:
    told = run_with("warm_up(wait=True)", unwritable)
    assert told == (f"False {simulated()}\n", "")


def test_a_manager_compiles_in_memory_where_compiled_code_cannot_be_kept(unwritable: dict[str, str]) -> None:
    told = run_with("warm_up(), warm_up(wait=True)", unwritable)
    assert told == (f"False True {simulated()}\n", "")


def test_compiled_code_is_kept_where_numba_is_told_to(unwritable: dict[str, str], tmp_path: Path) -> None:
    unwritable["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    told = run_with("warm_up(wait=True)", unwritable)
    assert told == (f"True {simulated()}\n", "")
    assert list(tmp_path.glob("cache/**/*.nbc"))


PLAN = "grid([Range(0, 1), Range(1, 2)], 2, 9, recompute=True)"
CALIBRATION = "Calibration.from_json(json.loads(sys.argv[1]))"


def simulated() -> float:
    return simulate(grid([Range(0, 1), Range(1, 2)], 2, 9, recompute=True), uniform(2)).time_s


def run_with(expression: str, environment: dict[str, str]) -> tuple[str, str]:
    """What a process prints of an expression and of a simulated step."""
    code = (
        "import json, sys\nfrom makara.pipeline import Range, grid\n"
        "from makara.simulator import Calibration, simulate, warm_up\n"
        f"print({expression}, simulate({PLAN}, {CALIBRATION}).time_s)\n"
    )
    calibration = json.dumps(uniform(2).to_json())
    ran = subprocess.run(
        [sys.executable, "-c", code, calibration], env=environment, check=True, capture_output=True, text=True
    )
    return ran.stdout, ran.stderr
