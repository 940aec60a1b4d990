"""A look at a user's code before it is submitted: traced, cut, and run for one step in pieces and as it is.

`python -m makara.worker.check FOLDER ENTRYPOINT SETTINGS` prints one line of JSON and exits with 0: either
`{"ok": true, "model": {...}}` or `{"ok": false, "error": ..., "traceback": ..., "whole_traceback": ...,
"model": {...} or null}`, where `traceback` is the part in the user's code. It runs in a process of its own on
the user's machine, so that whatever the code does happens there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from ...model.data import Batches, least_sizes, open_dataset
from ...model.errors import TooFewSamples, UntraceableModel, UserCodeError
from ...model.partition.partition import Sections, choose_cuts, most_sections, split
from ...model.precision import Precision, dtype_name
from ...model.tracebacks import first_line, whole
from ...model.tracing.trace import TracedModel, trace
from ...model.training import Training, load_entrypoint
from ...protocol.answers import write_answer
from ...protocol.stages import stage
from .comparison import NUM_MICRO_BATCHES, Comparison, watch_for
from .coupling import LOSS, judge_coupling, loss_couples, made_up_outputs
from .findings import TOLERANCE, Report
from .global_state import Watch
from .losses import LossRecorder
from .memory import Needs, refusal
from .neighbours import compare_neighbours
from .optimizers import check_optimizer, check_schedule
from .second_reading import SecondReading, second_reading
from .single_sections import run_sections

_NO_TRACEBACK = {"traceback": None, "whole_traceback": None}
_OWN_FAULT = (
    "the check broke off, and no line of your code is known to be at fault. `makara check --traceback` "
    "prints what to report: "
)


class CheckSettings(BaseModel):
    """The part of the job's specification that the check depends on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    global_batch_size: int | None = None  # None: any
    steps: int | None = None  # None: not known
    seed: int = 0
    microbatch_size: int | None = None
    num_sections: int | None = None
    pipeline_parallel_degree: int | None = None
    most_workers: int = 1  # as many as the job may get
    precision: Precision = "fp32"
    compare: bool = True  # False: leave the comparison with the eager module out, and say so
    memory_bytes: int | None = None  # that are free; None: as the machine and the cgroup say
    # Leave the comparison with the eager module out when it would take longer; None: take the time.
    max_seconds: float | None = None


def check(
    training: Training, settings: CheckSettings, folder: Path, reading: SecondReading | None = None
) -> dict[str, Any]:
    """Describe the model and the dry run (`findings`: none when all is well).

    The step is compared in fp32 whatever the job's precision: what is looked for is no matter of rounding.
    `folder`: of the user's files. `reading`: another process, whose samples must be the same. Raises
    `UserCodeError`, `UntraceableModel` naming the call.
    """
    began = time.perf_counter()
    stage("tracing the model")
    chain = _cut_first(training, settings)
    m = chain.traced.microbatch_size
    watch, report = watch_for(training, folder), Report(notes=_of_size(m, settings))
    stage("checking the optimizer")
    check_optimizer(training, chain, watch, report)
    check_schedule(training, settings.steps or 0)
    before = time.perf_counter()
    dataset = open_dataset(training, settings.seed)
    opened_s = time.perf_counter() - before
    batches = Batches(dataset, settings.seed, NUM_MICRO_BATCHES * m, m)
    needs = Needs(chain)
    leaks = _keep_apart(watch, report)
    left_out = leaks or _unwanted(settings, needs)
    no_memory = refusal(needs.whole_bytes(), settings.memory_bytes) if left_out is None else None
    left_out, not_run = left_out or no_memory, None
    if left_out is None:
        plain = chain if settings.precision == "fp32" else _cut(training, m, settings, "fp32")
        stage("comparing one step in sections with one of your module")
        Comparison(training, plain, batches, settings.seed, watch, report).run()
    else:
        first = 0 if no_memory else chain.num_sections - 1
        pairs = settings.compare and not leaks
        not_run = _run_parts(training, chain, settings, batches, needs, report, first, pairs)
    judge_coupling(report, m, settings.microbatch_size is not None, settings.global_batch_size)
    if reading is not None and not report.blames("Training.dataset"):
        reading.compare(dataset, settings.seed, opened_s, report)
    return {
        **_describe(chain),
        "num_samples": len(dataset),
        "findings": [asdict(finding) | {"text": str(finding)} for finding in report.findings],
        "notes": report.notes,
        "largest_differences": report.largest,
        "tolerance": TOLERANCE,
        "random_operations": report.random_operations,
        "not_compared": left_out,
        "memory_bytes": needs.whole_bytes(),
        "last_section_not_run": not_run,
        "seconds": time.perf_counter() - began,
    }


def _cut_first(training: Training, settings: CheckSettings) -> Sections:
    """For micro-batches of the job's size; of the least that there may be, if it was left open."""
    if settings.microbatch_size is not None:
        return _cut(training, settings.microbatch_size, settings, settings.precision)
    one, *more = least_sizes(settings.global_batch_size or 2)
    try:
        return _cut(training, one, settings, settings.precision)
    except TooFewSamples:
        if not more:
            raise
        return _cut(training, more[0], settings, settings.precision)


def _of_size(m: int, settings: CheckSettings) -> list[str]:
    """Notes on an m that batch norm and the global batch call for."""
    batch = settings.global_batch_size
    if settings.microbatch_size is not None or batch is None or m <= 2:
        return []
    return [
        f"batch norm needs micro-batches of two samples or more, and {m} is the least that divides "
        f"training.global_batch_size ({batch}): a step has {batch // m} of them, and no more can "
        "be under way at once. An even global batch allows 2"
    ]


def _cut(training: Training, m: int, settings: CheckSettings, precision: Precision) -> Sections:
    traced = trace(training, m, settings.seed, precision)
    try:
        cuts = choose_cuts(
            traced,
            settings.num_sections,
            least=settings.pipeline_parallel_degree or 1,
            workers=settings.most_workers,
            marks=training.cuts,
        )
        return split(traced, cuts)
    except ValueError as error:
        raise UserCodeError(f"parallelism.{error}") from error


def _keep_apart(watch: Watch, report: Report) -> str | None:
    """Why a run of the model is out of the question after its trace, or None."""
    leaked = watch.leaked()
    if not leaked:
        return None
    report.find(
        "the model's forward",
        f"it stores a tensor in {', '.join(leaked)}: what reads it, in the next call or elsewhere, would be "
        "in another process, or at another micro-batch",
        "Pass the value on as an argument or a result; make state that training must keep a buffer",
    )
    return "the model's forward leaves tensors behind"


def _unwanted(settings: CheckSettings, needs: Needs) -> str | None:
    """Why the user does not want the comparison, or None."""
    if not settings.compare:
        return "--skip-comparison was given"
    seconds = needs.seconds() if settings.max_seconds is not None else 0.0
    if seconds > (settings.max_seconds or 0.0):
        return (
            f"it would take about {seconds:.0f} s on this machine; `makara check` takes as long as it needs"
        )
    return None


def _run_parts(
    training: Training,
    chain: Sections,
    settings: CheckSettings,
    batches: Batches,
    needs: Needs,
    report: Report,
    first: int,
    pairs: bool,
) -> str | None:
    """Run the sections from `first` on one by one, `pairs` of them with their cut and without, and the loss.
    Returns why the last section was not run, or None."""
    stage("running single sections")
    batch, limit = batches.micro_batch(0, 0), settings.memory_bytes
    note, not_run = run_sections(chain, training, settings.seed, batch, limit, needs, first)
    report.notes += [note] if note else []
    if pairs:
        stage("comparing neighbouring sections with the two joined")
        seconds = settings.max_seconds
        compare_neighbours(chain, training, settings.seed, batch, needs, report, limit, seconds)
    if not report.findings:
        _try_loss_alone(training, chain.traced, batches, report)
    return not_run


def _try_loss_alone(training: Training, traced: TracedModel, batches: Batches, report: Report) -> None:
    """What the loss alone shows on made-up outputs, where the model is not run as a whole: state that it
    keeps, a metric, and whether it makes samples depend on each other."""
    recorder = LossRecorder(training.loss)
    outputs = made_up_outputs(traced, NUM_MICRO_BATCHES)
    given = [batches.micro_batch(0, i) for i in range(NUM_MICRO_BATCHES)]
    coupled = loss_couples(recorder, list(zip(outputs, given, strict=True)))
    recorder.blame(report)
    if coupled:
        report.batch_coupled = LOSS
        return
    if coupled is None:
        report.notes.append(
            "whether the loss makes the samples of a micro-batch depend on each other is not known: it "
            "refuses outputs that are made up, and the step was not run"
        )


def _describe(chain: Sections) -> dict[str, Any]:
    traced, m = chain.traced, chain.traced.microbatch_size
    num_elements = {name: traced.tensors[name].numel() for name in traced.parameter_names}
    types = sorted({dtype_name(traced.tensors[n].dtype) for n in traced.parameter_names})
    cuts = [sum(value.size_bytes for value in values) // m for values in chain.crossing]
    return {
        "num_parameters": sum(num_elements.values()),
        "microbatch_size": m,
        "parameter_types": types,
        "num_sections": chain.num_sections,
        "most_sections": most_sections(traced),
        "sections": [
            {
                "label": section.label,
                "num_parameters": sum(num_elements[name] for name in section.parameters),
                "cut_bytes_per_sample": cuts[section.index] if section.index < len(cuts) else None,
            }
            for section in chain.sections
        ],
        "shared_parameters": {name: list(sections) for name, sections in sorted(chain.shared.items())},
        "tied_parameters": dict(traced.aliases),
        "weights": {name: list(traced.tensors[name].shape) for name in traced.parameter_names},
        "graph_hash": traced.graph_hash,
        "torch_version": torch.__version__,
        "unused_parameters": [
            name
            for name in traced.parameter_names
            if traced.tensors[name].requires_grad and name not in traced.trainable
        ],
        "frozen_sections": chain.frozen,
        "evaluation_mode": list(traced.evaluating),
        "buffers": {name: _combined(traced.tensors[name]) for name in sorted(chain.updated_buffers)},
        "cut_bytes_per_sample": cuts,
    }


def _combined(buffer: torch.Tensor) -> str:
    return "mean over micro-batches" if buffer.is_floating_point() else "advances once a step"


def main() -> None:
    folder, entrypoint, settings = sys.argv[1:]
    answer: dict[str, Any]
    with contextlib.redirect_stdout(sys.stderr):  # the user's code may print; the answer stands alone
        try:
            given = CheckSettings.model_validate_json(settings)
            stage(f"calling {entrypoint}")
            with second_reading(Path(folder), entrypoint, given.seed) as reading:
                training = load_entrypoint(Path(folder), entrypoint)
                model = check(training, given, Path(folder).resolve(), reading)
            found = "\n".join(finding["text"] for finding in model["findings"])
            answer = {"ok": not found, "model": model, "error": found or None} | _NO_TRACEBACK
        except (UserCodeError, UntraceableModel) as error:
            answer = _failed(str(error), error.traceback, error)
        except Exception as error:  # whatever it is, it is told in a few lines
            answer = _failed(f"{_OWN_FAULT}{type(error).__name__}: {first_line(error)}", None, error)
    write_answer(answer)


def _failed(error: str, told: str | None, cause: Exception) -> dict[str, Any]:
    return {"ok": False, "model": None, "error": error, "traceback": told, "whole_traceback": whole(cause)}
