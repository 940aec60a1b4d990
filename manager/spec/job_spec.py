"""`JobSpec`: the job file, one YAML document, checked completely before anything is stored or rented."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ...protocol.instruction_sets import InstructionSet
from ...protocol.messages import JobSettings, StoreConfig
from ...simulator.validation import FieldFaults, shown
from .environment import Variable, environment_faults
from .fields import JobSection, Positive, Text, seconds_of, size_of, split_number
from .other_tools import not_a_command
from .paths import expanded
from .resources import Resources, resource_faults
from .spec_errors import WHOLE, JobSpecError, explain
from .start_source import resolved, start_faults
from .store_uri import is_absolute, uri_faults
from .yaml_text import read_yaml

__all__ = [
    "JobSpec",
    "JobSpecError",
    "Resources",
    "parse_spec",
    "parse_yaml",
    "resolve_uri",
    "size_of",
    "to_settings",
]

T = TypeVar("T")


def parse_yaml(text: str) -> JobSpec:
    """Parse a YAML text. Raises `JobSpecError` with the line of each fault."""
    value = read_yaml(text)
    try:
        return parse_spec(value)
    except JobSpecError as error:
        raise error.located(text) from None


def parse_spec(value: object) -> JobSpec:
    """Parse a mapping (the body of a submission). Raises `JobSpecError`."""
    if not isinstance(value, Mapping):
        given = "nothing" if value is None else shown(value)
        raise JobSpecError([(WHOLE, f"expected a mapping of keys to values, got {given}")])
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # half a surrogate pair, a list that holds itself
        raise JobSpecError([(WHOLE, f"not what JSON can hold: {error}")]) from error
    try:
        return JobSpec.model_validate(value)
    except ValidationError as error:
        raise explain(error, JobSpec) from None


def to_settings(spec: JobSpec, job: str, bundle_sha256: str) -> JobSettings:
    """The settings that a trainer needs. Raises `JobSpecError` if `checkpoint.uri` is still relative."""
    uri = spec.checkpoint.uri
    if not is_absolute(uri):
        raise JobSpecError(
            [("checkpoint.uri", f"{uri!r} is relative; expected file:///absolute/path, s3:// or az://")]
        )
    return JobSettings(
        job=job,
        entrypoint=spec.entrypoint,
        seed=spec.training.seed,
        steps=spec.training.steps,
        global_batch_size=spec.training.global_batch_size,
        microbatch_size=spec.parallelism.microbatch_size,
        num_sections=spec.parallelism.num_sections,
        pipeline_parallel_degree=spec.parallelism.pipeline_parallel_degree,
        numerics=spec.training.numerics,
        precision=spec.training.precision,
        threads=spec.resources.threads,
        instruction_set=spec.training.instruction_set,
        device_memory_bytes=spec.resources.device_memory,
        workers_per_node=spec.resources.workers_per_node,
        most_workers=spec.resources.most_workers,
        store=StoreConfig(uri=uri, endpoint=spec.checkpoint.endpoint, region=spec.checkpoint.region),
        checkpoint_interval_steps=spec.checkpoint.interval_steps,
        checkpoint_interval_s=spec.checkpoint.interval_s,
        bundle_sha256=bundle_sha256,
        setup=spec.setup,
        envs=spec.envs,
    )


def resolve_uri(spec: JobSpec, folder: Path) -> JobSpec:
    """The same job with relative paths in `checkpoint` below `folder` (the job file's own), as URIs, and `~`
    replaced by the home of the user who runs this. Raises `JobSpecError`."""
    changes: dict[str, str] = {}
    if not is_absolute(spec.checkpoint.uri):
        path = _about("checkpoint.uri", expanded, spec.checkpoint.uri)
        changes["uri"] = (folder / path).resolve().as_uri()
    if spec.checkpoint.start_from is not None:
        changes["start_from"] = _about("checkpoint.start_from", resolved, spec.checkpoint.start_from, folder)
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=changes)})


def _about(field: str, read: Callable[..., T], *arguments: object) -> T:
    """What `read` returns. Raises `JobSpecError` about `field` for its `ValueError`."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise JobSpecError([(field, str(error))]) from None


# ---- the form ----------------------------------------------------------------------------------------------


def _no_file(entrypoint: object) -> object:
    """Raise `ValueError` for a command, and if the module is written as a file name."""
    module, _, function = entrypoint.partition(":") if isinstance(entrypoint, str) else ("", "", "")
    if command := not_a_command(str(entrypoint)):
        raise ValueError(command)
    if "/" in module or module.endswith(".py"):
        name = module.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
        expected = f"{name}:{function or 'build'}"
        raise ValueError(f"{entrypoint!r} names a file; expected the module as Python imports it: {expected}")
    return entrypoint


def _interval(value: object) -> object:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if split_number(text) is None:
        raise ValueError(f"{shown(value)} is no interval; expected steps (10) or a time (90s, 10m, 2h)")
    return value


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _switch(value: object) -> object:
    """Turn booleans back into text: YAML reads a bare `on` or `off` as one."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Auto = Annotated[Positive | None, BeforeValidator(_auto)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class TrainingSpec(JobSection):
    """What is computed: `steps` steps of exactly `global_batch_size` samples each."""

    global_batch_size: Annotated[int, Field(ge=1, le=2**20)]
    steps: Positive
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    numerics: Literal["exact", "fast"] = "fast"
    instruction_set: InstructionSet = "native"  # to which trainers are limited on every VM
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0


class Parallelism(JobSection):
    """The shape of plans; None (`auto` in the file) leaves the choice to the planner."""

    pipeline_parallel_degree: Auto = None
    data_parallel_degree: Auto = None
    microbatch_size: Auto = None
    num_sections: Auto = None
    recompute: Switch = "auto"
    halves: Switch = "auto"
    unequal_pipelines: Annotated[Literal["auto", "off"], BeforeValidator(_switch)] = "off"
    optimizer_offload: Switch = "auto"


class CheckpointSpec(JobSection):
    """Where checkpoints are stored, how often (steps, or a time with its unit), and how many are kept."""

    uri: Annotated[str, Field(min_length=1)]
    endpoint: str | None = None
    region: str | None = None
    interval: Annotated[int | str, BeforeValidator(_interval)] = "10m"
    keep_latest_k: Positive = 3
    start_from: Annotated[Text, Field(min_length=1)] | None = None  # JOB or URI of its folder, @STEP

    @property
    def interval_steps(self) -> int | None:
        if isinstance(self.interval, int):
            return self.interval
        number, unit = split_number(self.interval) or (0.0, "")
        return None if unit else int(number)

    @property
    def interval_s(self) -> float | None:
        return seconds_of(str(self.interval))


class Resilience(JobSection):
    """What deaths a job is to survive without its store: of up to `tolerated_failures` VMs at once."""

    tolerated_failures: Annotated[int, Field(ge=0, lt=2**16)] = 0


class Retry(JobSection):
    """How often the job restarts after an error of its own code; preemptions are not counted."""

    max_restarts_on_errors: Annotated[int, Field(ge=0, lt=2**31)] = 0


class JobSpec(JobSection):
    """A whole job file. Built by `parse_yaml` or `parse_spec`."""

    name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="1 to 63 lower-case letters, digits and hyphens, with none of the hyphens at an end",
    )
    workdir: Text = "."
    entrypoint: Annotated[str, BeforeValidator(_no_file)] = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function, for example train:build"
    )
    setup: Text | None = None
    envs: dict[Variable, Text] = Field(default_factory=dict)
    secrets: list[Variable] = Field(default_factory=list)  # names of environment variables of the submitter
    priority: Annotated[int, Field(ge=0, le=100)] = 0  # of jobs that wait for the same VMs, higher ones first
    resources: Resources
    training: TrainingSpec
    parallelism: Annotated[Parallelism, BeforeValidator(lambda v: {} if v == "auto" else v)] = Parallelism()
    checkpoint: CheckpointSpec
    resilience: Resilience = Resilience()
    retry: Retry = Retry()

    @model_validator(mode="after")
    def _fields_agree(self) -> JobSpec:
        own = self.checkpoint
        faults = [
            *resource_faults(self.resources),
            *_worker_faults(self),
            *_batch_faults(self),
            *_copies_faults(self),
            *environment_faults(self.envs, self.setup),
            *uri_faults(own.uri, own.endpoint, own.region),
            *start_faults(own.start_from, own.uri, own.endpoint, own.region),
        ]
        if faults:
            raise FieldFaults(faults)
        return self

    @property
    def offload(self) -> Literal["auto", "on", "off"]:
        """The planner's setting for optimizer offload. With `exact`, `auto` means `off`: a device may round
        differently than its host, so plans must not switch."""
        wanted = self.parallelism.optimizer_offload
        return "off" if wanted == "auto" and self.training.numerics == "exact" else wanted


def _worker_faults(spec: JobSpec) -> list[tuple[str, str]]:
    most, parallel = spec.resources.most_workers, spec.parallelism
    wanted = (parallel.pipeline_parallel_degree or 1) * (parallel.data_parallel_degree or 1)
    if wanted <= most:
        return []
    return [("parallelism", f"P·D = {wanted} workers, but max_nodes · workers_per_node gives {most}")]


def _copies_faults(spec: JobSpec) -> list[tuple[str, str]]:
    """Why each section can never live on as many VMs as `tolerated_failures` asks for."""
    copies, resources, parallel = spec.resilience.tolerated_failures + 1, spec.resources, spec.parallelism
    if copies == 1:
        return []
    depth, replicas = parallel.pipeline_parallel_degree or 1, parallel.data_parallel_degree
    num_micro_batches = spec.training.global_batch_size // (parallel.microbatch_size or 1)
    least = copies * -(-depth // resources.workers_per_node)
    why = ""
    if least > resources.max_nodes:
        why = f"that needs at least {least} VMs, and resources.max_nodes is {resources.max_nodes}"
    elif replicas is not None and replicas < copies:
        why = f"parallelism.data_parallel_degree is {replicas}"
    elif num_micro_batches < copies:
        why = f"a step has {num_micro_batches} micro-batches, and each copy takes one at least"
    if not why:
        return []
    asked = copies - 1
    return [("resilience.tolerated_failures", f"{asked} asks for {copies} copies of each section; {why}")]


def _batch_faults(spec: JobSpec) -> list[tuple[str, str]]:
    training, parallel = spec.training, spec.parallelism
    faults: list[tuple[str, str]] = []
    m = parallel.microbatch_size
    if m is not None and training.global_batch_size % m:
        message = f"{training.global_batch_size} is not divisible by parallelism.microbatch_size ({m})"
        faults.append(("training.global_batch_size", message))
    most = training.global_batch_size // (m or 1)
    if (parallel.data_parallel_degree or 1) > most:
        message = f"{parallel.data_parallel_degree} is more than the {most} micro-batches of a step"
        faults.append(("parallelism.data_parallel_degree", message))
    depth, num_sections = parallel.pipeline_parallel_degree, parallel.num_sections
    if depth and num_sections and depth > num_sections:
        message = f"{depth} is more than parallelism.num_sections ({num_sections})"
        faults.append(("parallelism.pipeline_parallel_degree", message))
    return faults
