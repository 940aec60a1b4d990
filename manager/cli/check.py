"""`makara check`: compares one step of the partitioned model with one of the model as it is. No manager."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..spec.job_file import read_job
from ..spec.job_spec import JobSpecError
from ..spec.paths import expanded
from .stages import Stages, writer
from .user_code import Trial, UserCodeRefused, settings_of, try_out

_EQUAL, _DIFFERS = 0, 2
_SHOWN = 4  # names in a list


def check(options: argparse.Namespace) -> int:
    """Run the check; returns 0 if both steps agree, 2 if they do not or the code is at fault."""
    trial, entrypoint = _try(options)
    if options.json:
        print(json.dumps(asdict(trial)))
    elif trial.model is None:
        if options.traceback and trial.whole_traceback:
            print(trial.whole_traceback, file=sys.stderr)
        raise UserCodeRefused(trial.refusal)
    else:
        _show(entrypoint, trial.model, Console(highlight=False, markup=False, soft_wrap=True))
    return _DIFFERS if trial.error else _EQUAL


def notes(model: Mapping[str, Any]) -> list[str]:
    """The check's notes on a model, a line each."""
    return [f"note: {note}" for note in model["notes"]]


def summary(model: Mapping[str, Any]) -> str:
    """One line about what was compared, for a model that passed."""
    seconds = f"{model['seconds']:.1f} s"
    if model["not_compared"]:
        also = "" if model["last_section_not_run"] else ", loss"
        return (
            f"checked trace{also} and optimizer in {seconds}; one step was not compared with your module's: "
            f"{model['not_compared']}"
        )
    worst = max(model["largest_differences"].values(), default=0.0)
    return f"checked in {seconds}: one step in pieces is your module's (largest difference {worst:.1g})"


def _try(options: argparse.Namespace) -> tuple[Trial, str]:
    settings: dict[str, Any] = {}
    envs: Mapping[str, str] = {}
    entrypoint, workdir = options.entrypoint, options.workdir or Path()
    if entrypoint is not None and options.file is None and entrypoint.endswith((".yaml", ".yml")):
        options.file, entrypoint = expanded(entrypoint), None  # as if given with -f
    if options.file is not None:
        spec, folder = read_job(options.file)
        settings, envs = settings_of(spec), spec.envs
        entrypoint, workdir = entrypoint or spec.entrypoint, options.workdir or folder
    if entrypoint is None:
        raise JobSpecError(
            [("entrypoint", "expected module:function, for example train:build, or -f job.yaml")]
        )
    if not workdir.is_dir():
        raise JobSpecError([("workdir", f"{workdir} is no folder")])
    if options.microbatch_size is not None:
        settings["microbatch_size"] = options.microbatch_size
    if options.num_sections is not None:
        settings["num_sections"] = options.num_sections
    if options.memory is not None:
        settings["memory_bytes"] = options.memory
    settings["compare"] = not options.skip_comparison
    with Stages(writer(options)) as stages:
        return try_out(workdir.resolve(), entrypoint, settings, envs, stages.begin), entrypoint


def _show(entrypoint: str, model: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"{entrypoint}: {model['num_parameters']:,} parameters ({', '.join(model['parameter_types'])}), "
        f"{model['num_sections']} sections, micro-batches of {model['microbatch_size']}"
    )
    for line in (*_sections(model["sections"]), *_facts(model)):
        console.print(line)
    if model["findings"]:
        console.print(f"\n{len(model['findings'])} found:")
        for finding in model["findings"]:
            console.print(f"* {finding['where']}: {finding['differs']}.\n  -> {finding['remedy']}.")
    else:
        console.print(summary(model))


def _sections(sections: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    width = max(len("modules"), *(len(section["label"]) for section in sections))
    yield f"section  {'modules':<{width}}  {'parameters':>14}  {'bytes on, per sample':>20}"
    for index, section in enumerate(sections):
        crossing = section["cut_bytes_per_sample"]
        onward = "" if crossing is None else f"{crossing:,}"
        size = f"{section['num_parameters']:,}"
        yield f"{index:<7}  {section['label']:<{width}}  {size:>14}  {onward:>20}".rstrip()


def _stages(num_sections: int, most: int) -> str:
    """How K limits P, and what raises it."""
    if num_sections == most:
        return f"stages: at most {num_sections} (P); the model's graph has no more places for a cut"
    finer = f"parallelism.num_sections (up to {most}) or more names in Training.cuts"
    return f"stages: at most {num_sections} (P); to cut finer: {finer}"


def _facts(model: Mapping[str, Any]) -> Iterable[str]:
    yield _stages(model["num_sections"], model["most_sections"])
    for name, sections in model["shared_parameters"].items():
        yield f"shared: {name} by sections {', '.join(str(index) for index in sections)}"
    by_way: dict[str, list[str]] = {}
    for name, way in model["buffers"].items():
        by_way.setdefault(way, []).append(name)
    for way, names in by_way.items():
        yield f"buffers: {_some(names)}: {way}"
    if model["unused_parameters"]:
        yield f"never used, so never trained: {_some(model['unused_parameters'])}"
    if evaluating := model["evaluation_mode"]:
        yield f"in evaluation mode, as Training.model returns them: {_some(evaluating)}"
    if frozen := model["frozen_sections"]:
        which = "section 0 gets" if frozen == 1 else f"sections 0 to {frozen - 1} get"
        yield f"frozen: {which} no gradient; of these nothing is kept and nothing recomputed"
    if model["random_operations"]:
        calls = ", ".join(f"{name} {count} times" for name, count in model["random_operations"].items())
        yield f"random: {calls}; both steps drew the same numbers"
    if model["largest_differences"]:
        found = ", ".join(f"{what} {value:.1g}" for what, value in model["largest_differences"].items())
        yield f"largest differences, of {model['tolerance']:g} allowed: {found}"
    if model["last_section_not_run"]:
        yield f"note: the last section, with the loss, was not run: {model['last_section_not_run']}"
    yield from notes(model)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
