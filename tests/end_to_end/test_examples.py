"""The examples do what their pages say: a user's own check accepts them, and they learn."""

from __future__ import annotations

import pytest
import user_models
from makara.manager.cli.apply import check_code
from makara.manager.spec.job_file import read_job
from makara.worker import Training
from reference import run_reference
from repository import ROOT, repository_files

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
NAMES = [path.parent.name for path in repository_files(ROOT) if path.match("examples/*/train.py")]


@pytest.mark.parametrize("name", NAMES)
def test_apply_accepts_an_example_and_finds_enough_sections_for_its_vms(name: str) -> None:
    spec, workdir = read_job(EXAMPLES / name / "job.yaml")
    assert spec.name == name
    assert check_code(spec, workdir)["num_sections"] >= spec.resources.max_nodes
    assert (EXAMPLES / name / "README.md").read_text().count("makara apply -f job.yaml") == 1


@pytest.mark.parametrize(
    ("training", "m", "steps"),
    [(user_models.example("resnet").build(), 32, 30), (user_models.moe(), 8, 20)],
    ids=["resnet", "a narrow moe"],
)
def test_an_example_learns(training: Training, m: int, steps: int) -> None:
    losses, _ = run_reference(
        training,
        microbatch_size=m,
        num_micro_batches=1,
        cuts=[],
        steps=steps,
        seed=7,
        numerics="fast",
    )
    print(losses)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
