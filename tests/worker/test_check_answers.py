"""What strangers' models get from `makara check`: it works, or a few lines say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_models
import pytest
import torch
from makara.manager.cli import main as cli
from makara.model.errors import TooFewSamples, UntraceableModel, UserCodeError
from makara.model.tracebacks import users_part
from makara.model.tracing.trace import trace
from makara.protocol.messages import JobSettings, StoreConfig
from makara.worker.check.check import CheckSettings, check
from makara.worker.check.memory import refusal
from makara.worker.profiling.footprint import Footprints
from makara.worker.profiling.subject import Subject
from makara.worker.profiling.survey import survey
from makara.worker.sections.grad_sums import FastSum, Totals
from plain_models import (
    Cancelling,
    Checkpointed,
    InFloat32,
    Layers,
    Long,
    LowPrecision,
    Normed,
    Passing,
    Turning,
    Wide,
    training,
)
from torch import nn

FOLDER = Path(__file__).parents[1]
SUPPORT = FOLDER / "support"


def examine(model: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    return check(training(model), CheckSettings(**settings), FOLDER)


def command(folder: Path, source: str, *options: str) -> int:
    path = f"import sys\nsys.path.append({str(SUPPORT)!r})\n"
    imports = "import torch\nimport plain_models\nfrom plain_models import *\n"
    (folder / "train.py").write_text(f"{path}{imports}\n\ndef build():\n    return {source}\n")
    return cli.main(["check", "train:build", "--workdir", str(folder), *options])


# ---- batch norm and the smallest micro-batch ---------------------------------------------------------------


def test_batch_norm_gets_micro_batches_of_two_by_itself() -> None:
    report = examine(plain_models.batch_norm)
    assert report["microbatch_size"] == 2
    assert report["findings"] == []


def test_batch_norm_with_a_micro_batch_of_one_says_what_to_set() -> None:
    with pytest.raises(TooFewSamples, match="microbatch_size to 2 or more") as caught:
        examine(plain_models.batch_norm, microbatch_size=1)
    assert "plain_models.py" in (caught.value.call or "")


def job(tmp_path: Path, **fields: Any) -> JobSettings:
    return JobSettings(
        job="j",
        entrypoint="train:build",
        global_batch_size=fields.pop("global_batch_size", 8),
        steps=1,
        seed=0,
        numerics="fast",
        store=StoreConfig(uri=tmp_path.as_uri()),
        bundle_sha256="",
        **fields,
    )


@pytest.mark.parametrize("several", [False, True])
def test_a_job_with_batch_norm_is_measured_from_two_on(tmp_path: Path, several: bool) -> None:
    subject = Subject(training(plain_models.batch_norm), job(tmp_path), torch.device("cpu"))
    subject.hold_first()
    found = survey(subject, seconds=0.0, several=several)
    assert found.recipe.microbatch_size == 2
    assert min(layout.microbatch_size for layout in found.layouts) == 2


def test_batch_norm_in_a_job_of_an_odd_global_batch_gets_the_least_size_that_divides_it(
    tmp_path: Path,
) -> None:
    """Found: the check took 2 for granted, and the job then failed on its VMs."""
    settings = job(tmp_path, global_batch_size=9)
    subject = Subject(training(plain_models.batch_norm), settings, torch.device("cpu"))
    subject.hold_first()
    assert survey(subject, seconds=0.0).recipe.microbatch_size == 3
    report = examine(plain_models.batch_norm, global_batch_size=9)
    assert report["microbatch_size"] == 3
    assert report["findings"] == []
    assert "3 is the least that divides training.global_batch_size (9): a step has 3" in report["notes"][0]


def test_batch_norm_in_a_job_of_one_sample_says_what_to_set(tmp_path: Path) -> None:
    settings = job(tmp_path, global_batch_size=1)
    with pytest.raises(TooFewSamples, match=r"Set training\.global_batch_size and parallelism\."):
        Subject(training(plain_models.batch_norm), settings, torch.device("cpu")).hold_first()
    with pytest.raises(TooFewSamples, match="to 2 or more"):
        examine(plain_models.batch_norm, global_batch_size=1)


# ---- types of parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_doubles_is_told_to_leave_them_out(dtype: torch.dtype) -> None:
    with pytest.raises(UntraceableModel, match=r"'first.weight' is float64.*Leave out \.double\(\)"):
        trace(training(lambda: Layers().double(), dtype), 1)


def test_a_complex_parameter_is_named_with_a_way_out_that_works() -> None:
    with pytest.raises(UntraceableModel, match=r"'between.turn' is complex64.*view_as_complex"):
        trace(training(lambda: Layers(lambda: Turning(True))), 1)
    assert examine(lambda: Layers(lambda: Turning(False)))["findings"] == []


# ---- what a user wraps a model in --------------------------------------------------------------------------


def test_a_model_wrapped_whole_in_torch_compile_is_what_it_wraps() -> None:
    report = examine(lambda: torch.compile(Layers(), backend="eager"))
    assert report["findings"] == []
    traced = trace(training(lambda: torch.compile(Layers(), backend="eager")), 1)
    assert traced.graph_hash == trace(training(Layers), 1).graph_hash


def test_a_forward_that_names_no_argument_says_so() -> None:
    with pytest.raises(UserCodeError, match=r"forward of Passing names no argument.*def forward\(self, x"):
        trace(training(Passing), 1)


def test_checkpointed_batch_norm_counts_a_micro_batch_once_and_is_noted() -> None:
    report = examine(lambda: Checkpointed(reentrant=False))
    assert report["findings"] == []
    assert "'between.running_mean'" in report["notes"][0]
    assert "Makara once" in report["notes"][0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameters_that_reentrant_checkpointing_cuts_off_are_named() -> None:
    (finding,) = examine(lambda: Checkpointed(reentrant=True))["findings"]
    assert "no gradient reaches 'first.weight'" in finding["text"]
    assert "use_reentrant=False" in finding["remedy"]


# ---- rounding ----------------------------------------------------------------------------------------------


def test_what_rounding_makes_of_the_module_itself_is_not_blamed() -> None:
    """Found: DenseNet-121 was refused for 3e-5 in a gradient that is 9e-3 off in plain torch."""
    report = examine(Cancelling, microbatch_size=4, num_sections=2)
    assert report["largest_differences"]["gradient"] > report["tolerance"]
    assert report["findings"] == []
    assert "the gradient of 'shift' differs by up to" in report["notes"][0]
    assert "moves by" in report["notes"][0]
    assert "when its weights change by their last bit" in report["notes"][0]


def test_a_model_of_bfloat16_is_judged_by_the_rounding_of_bfloat16() -> None:
    report = examine(lambda: LowPrecision().bfloat16())
    assert report["parameter_types"] == ["bfloat16"]
    assert report["findings"] == []
    assert "which is rounding" in report["notes"][0]


def test_a_fault_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the pieces that are off by a hundredth, in a model whose rounding is 1e-4."""
    totals = FastSum.totals

    def off(self: FastSum, weight: float) -> Totals:
        found = totals(self, weight)
        return replace(found, gradients={n: gradient * 1.01 for n, gradient in found.gradients.items()})

    monkeypatch.setattr(FastSum, "totals", off)
    (finding,) = examine(Cancelling, microbatch_size=4, num_sections=2)["findings"]
    assert finding["where"] == "the model's backward"
    assert "'shift'" in finding["text"]


def test_a_model_that_runs_in_float32_only_is_judged_by_its_rounding() -> None:
    report = examine(lambda: InFloat32(Cancelling()), microbatch_size=4, num_sections=2)
    assert report["findings"] == []
    assert "which is rounding" in report["notes"][0]


def test_the_comparison_can_be_left_out_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "training(lambda: Checkpointed(reentrant=True))"
    assert command(tmp_path, source) == 2
    capsys.readouterr()
    assert command(tmp_path, source, "--skip-comparison") == 0
    assert "one step was not compared with your module's: --skip-comparison" in capsys.readouterr().out


# ---- memory ------------------------------------------------------------------------------------------------


def within(model: Callable[[], nn.Module], memory_bytes: int, **settings: Any) -> tuple[dict[str, Any], int]:
    """(the report with so much free memory, the bytes of tensors that it took at most)."""
    with Footprints("cpu") as taken:
        report = examine(model, memory_bytes=memory_bytes, **settings)
        taken.mark()
    return report, taken.phases[0].peak_bytes


def test_nothing_is_allocated_for_a_section_that_does_not_fit() -> None:
    """Found: a check of Linear(60000, 60000) grew to 19 GB, and the kernel killed it."""
    free = 50 << 20
    report, taken = within(lambda: Wide(1500, 1), free, num_sections=1)
    assert taken < 0.7 * free
    assert report["findings"] == report["notes"] == []
    for said in (report["not_compared"], report["last_section_not_run"]):
        assert "50 MiB are free, of which 70% may be used" in said
        assert "`makara check` does it where" in said


def test_a_refusal_says_how_few_bytes_are_free() -> None:
    said = refusal(5 << 20, 300)
    assert said is not None
    assert "5 MiB of memory; 300 bytes are free" in said


def test_a_model_that_refuses_zeros_is_checked_on_its_own_values() -> None:
    """Found: its last section was run on zeros first, and the loss was blamed for what came of that."""

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(output, (batch["y"].sum(1) > 0).float())

    report = check(replace(training(Normed), loss=loss), CheckSettings(num_sections=4), FOLDER)
    assert report["findings"] == []
    assert report["not_compared"] is None


def test_an_error_on_made_up_zeros_says_that_they_were_made_up() -> None:
    class Refusing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.between(self.first(x))
            return self.last(hidden / hidden.norm(dim=-1, keepdim=True)).sigmoid()

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(output, (batch["y"] > 0).float())

    given = replace(training(Refusing), loss=loss, cuts=["between"])
    assert check(given, CheckSettings(), FOLDER)["findings"] == []
    with pytest.raises(UserCodeError, match=r"Training\.loss: RuntimeError") as caught:
        check(given, CheckSettings(compare=False), FOLDER)
    assert "given zeros, made up for what the section before gives" in str(caught.value)
    assert "as one step was not run" in str(caught.value)


def test_where_a_step_does_not_fit_its_sections_are_run_one_by_one() -> None:
    free = 60 << 20
    report, taken = within(lambda: Wide(800, 3), free, num_sections=5)
    assert taken < 0.7 * free
    assert report["not_compared"] is not None
    assert report["last_section_not_run"] is None
    assert "the first 4 of 5 sections were run one by one" in report["notes"]


@pytest.mark.parametrize("wide", [False, True])
def test_the_whole_check_takes_no_more_than_it_says(wide: bool) -> None:
    model = (lambda: Wide(700, 2)) if wide else (lambda: Long(3))
    said = examine(model, memory_bytes=1, microbatch_size=2)["memory_bytes"]
    report, taken = within(model, 2 * said, microbatch_size=2)
    assert report["not_compared"] is None
    assert taken <= said == report["memory_bytes"]


def test_the_limit_can_be_given_and_the_command_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "training(lambda: Wide(500, 1))"
    assert command(tmp_path, source, "--num-sections", "3", "--memory", "15MB") == 0
    shown = capsys.readouterr().out
    assert "one step was not compared with your module's: it would need about" in shown
    assert "the first 2 of 3 sections were run one by one" in shown


# ---- tracebacks --------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the error: without those that name the stages of the check."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if re.search(r" \.\.\.$|: \d+ s$", line) is None]


def test_a_failing_model_is_told_in_a_few_lines_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "plain_models.misshapen()") == 2
    shown = told(capsys)
    assert len(shown) <= 12
    assert "the model cannot be traced: RuntimeError: shape '[3, 5]' is invalid" in shown[0]
    assert any("plain_models.py" in line and "in forward" in line for line in shown)
    assert not any("site-packages/torch" in line for line in shown)
    assert shown[-1].endswith("makara check with --traceback")


def test_the_whole_traceback_is_there_for_who_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "plain_models.misshapen()", "--traceback") == 2
    assert "torch/export" in capsys.readouterr().err
    assert command(tmp_path, "plain_models.misshapen()", "--json") == 2
    answer = json.loads(capsys.readouterr().out)
    assert "torch/export" in answer["whole_traceback"]
    assert "torch/export" not in answer["traceback"]


def test_what_the_check_itself_does_not_know_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data of doubles for a model of floats: its trace does not mind, and a section does."""
    assert command(tmp_path, "training(Layers, torch.float64)") == 2
    shown = told(capsys)
    assert len(shown) == 1
    assert "the check broke off" in shown[0]
    assert "dtype" in shown[0]


def test_a_traceback_shows_the_ends_of_a_long_way_and_what_the_users_code_caught() -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1) if left % 2 else other(left)
        raise LookupError("first")

    def other(left: int) -> None:
        deep(left - 1)

    def caught() -> None:
        try:
            deep(20)
        except LookupError as error:
            raise ValueError("second\nwith more lines") from error

    with pytest.raises(ValueError, match="second") as raised:
        caught()
    told = users_part(raised.value) or ""
    assert " more ...\n" in told
    assert told.index("LookupError: first") < told.index("which led to:") < told.index("ValueError: second")
    assert len(told.splitlines()) < 40


def test_without_a_line_of_the_users_there_is_no_traceback() -> None:
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(2, 2)(torch.zeros(3))
    raised.value.__traceback__ = None
    assert users_part(raised.value) is None
