"""Running statistics and the loss scale through deaths, a lost commit and the store, in real processes.

In fp16 the job overflows in its first five steps, so the lost commit is one that skips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.model.precision import Precision
from makara.protocol.messages import Phase
from test_trainers import STEPS, Run, assert_same, reference

ENTRYPOINT = "models:normed_mlp"


@pytest.fixture
def run(tmp_path: Path, precision: Precision) -> Iterator[Run]:
    made = Run(tmp_path, entrypoint=ENTRYPOINT, precision=precision, checkpoint_interval_steps=2)
    yield made
    made.fleet.close()


def assert_told(run: Run, precision: Precision) -> None:
    by_step = {metrics.step: metrics for metrics in run.fleet.metrics}
    assert [by_step[step + 1].loss for step in range(STEPS)] == reference(
        ENTRYPOINT, "exact", precision=precision
    )[0]
    if precision != "fp16":
        assert not any(metrics.skipped or metrics.loss_scale for metrics in run.fleet.metrics)
        return
    skipped = [step for step in sorted(by_step) if by_step[step].skipped]
    assert skipped == [1, 2, 3, 4, 5]
    assert [by_step[step].loss_scale for step in (1, 2, 6, STEPS)] == [2.0**16, 2.0**15, 2.0**11, 2.0**11]


@pytest.mark.parametrize(
    ("precision", "losers"),
    [
        ("fp16", ("b",)),
        ("fp16", ("a", "b")),
        ("fp32", ("a",)),
        pytest.param("bf16", ("a", "b"), marks=pytest.mark.soak),
    ],
)
def test_survivors_agree_about_the_last_commit(
    run: Run, precision: Precision, losers: tuple[str, ...]
) -> None:
    for worker in "ab":
        run.fleet.start(worker, fault="loses-commit-3" if worker in losers else None)
    run.fleet.form(run.plan(1, [2]), ["a", "b"])
    for worker in "ab":
        if worker in losers:
            run.fleet.wait_lost_commit(worker)
        else:
            run.fleet.wait_step(4, worker)
    run.fleet.abandon(1, "a", "b")
    run.fleet.wait_phase(Phase.IDLE, "a", "b")
    run.fleet.form(run.plan(2, [], 2), ["b", "a"])
    assert_same(run.finish("a", "b"), reference(ENTRYPOINT, "exact", precision=precision)[1])
    assert_told(run, precision)


@pytest.mark.parametrize("precision", ["fp16"])
def test_the_only_host_of_a_section_dies_and_the_store_gives_all_of_it_back(
    run: Run, precision: Precision
) -> None:
    run.fleet.start("a", "c")
    run.fleet.start("b", fault="dies-when-told")
    run.fleet.stand("b", 69)  # in its fourth step
    run.fleet.form(run.plan(1, [2], 1), ["a", "b"])
    run.fleet.wait(lambda: any(report.published for report in run.fleet.reports.values()))
    run.fleet.kill("b")
    run.fleet.abandon(1, "a")
    base = run.published()
    run.fleet.form(run.plan(2, [], 2), ["c", "a"], checkpoints=base)
    formed = run.fleet.reports["c"].formed
    assert formed is not None
    assert (formed.rung, formed.step) == ("store", base[0].step)
    assert_same(run.finish("a", "c"), reference(ENTRYPOINT, "exact", precision=precision)[1])


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_ranks_name_a_gradient_that_is_not_finite(tmp_path: Path, numerics: str) -> None:
    run = Run(tmp_path, entrypoint="models:exploding", numerics=numerics)
    try:
        run.fleet.start("a", "b")
        run.fleet.form(run.plan(1, [2]), ["a", "b"])
        reports = run.fleet.reports
        run.fleet.wait(lambda: all(r.failure is not None or r.lost for r in reports.values()))
        failures = [report.failure for report in reports.values() if report.failure is not None]
        assert failures, "one that lost the other may say that instead, but not both"
        for failure in failures:
            assert failure.kind == "user"
            assert re.search(
                r"step \d+: the gradient of '[\w.]+'.* is infinite or not a number", failure.message
            )
    finally:
        run.fleet.close()
