"""The model that is measured: traced and cut for one m at a time."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil
import torch

from ...model.data import least_sizes
from ...model.errors import TooFewSamples, UserCodeError
from ...model.partition.flops import compute_nodes
from ...model.partition.partition import Sections, choose_cuts, sections_for_workers, split
from ...model.partition.prices import measured_prices
from ...model.tracing.trace import TracedModel, trace
from ...model.training import Training
from ...protocol.gpus import usable_bytes
from ...protocol.instruction_sets import InstructionSet
from ...protocol.messages import JobSettings
from ...protocol.survey import Layout, SectionRow, TiedParameters
from ...simulator.calibration.measurements import Basis
from ..memory_watch import total_bytes
from ..recipe import other_graph
from .section import Conditions, measure_section


class Subject:
    """A job's model on this machine, held for one m: that of the last `hold`."""

    def __init__(self, training: Training, job: JobSettings, device: torch.device) -> None:
        self.job = job
        self.device = device
        self._training = training
        self._traced: TracedModel | None = None
        self._chain: Sections | None = None

    def hold(self, m: int) -> None:
        """Trace the model for micro-batches of m, unless it is held already."""
        if self._traced is None or self._traced.microbatch_size != m:
            self._traced = self._chain = None  # their memory first
            self._traced = trace(self._training, m, self.job.seed, self.job.precision)

    def hold_least(self) -> int:
        """Hold the model for the smallest m that it can be trained with, and say which: 1, or with batch norm
        the least other that divides the global batch. Raises `TooFewSamples` where there is none."""
        one, *more = least_sizes(self.job.global_batch_size)
        try:
            self.hold(one)
        except TooFewSamples:
            if not more:
                raise
            self.hold(more[0])
        return self._held.microbatch_size

    def hold_first(self) -> None:
        """Hold the model for the job's m, or the smallest one. Raises `TooFewSamples` where no such m divides
        the global batch."""
        if self.job.microbatch_size is not None:
            self.hold(self.job.microbatch_size)
        else:
            self.hold_least()

    def basis(self) -> Basis:
        """What the measurements of the model that is held depend on."""
        traced, job = self._held, self.job
        return Basis(
            graph_hash=traced.graph_hash,
            microbatch_size=traced.microbatch_size,
            global_batch_size=job.global_batch_size,
            num_sections=job.num_sections or 0,
            least_sections=0 if job.num_sections else job.pipeline_parallel_degree or 0,
            worker_sections=0 if job.num_sections else sections_for_workers(traced, job.most_workers),
            code_sha256=_code_sha256(job.entrypoint),
            precision=job.precision,
            numerics=job.numerics,
            threads=job.threads,
            device_kind=self.device.type,
            device_name=device_name(self.device, job.instruction_set),
            torch_version=torch.__version__,
            makara_version=version("makara"),
        )

    def operations(self) -> list[str]:
        """Of the model that is held."""
        return [str(node.target) for node in compute_nodes(self._held.graph)]

    def cut(self, pricing_s: float) -> Layout:
        """Cut as the job will be; operations are priced by running them for `pricing_s` seconds at most.
        Raises `UserCodeError` where it cannot be cut as the job file says."""
        training = self._training
        prices = None if training.cuts is not None else _prices(self._held, self.device, pricing_s)
        try:
            cuts = choose_cuts(
                self._held,
                self.job.num_sections,
                least=self.job.pipeline_parallel_degree or 1,
                workers=self.job.most_workers,
                marks=training.cuts,
                work=prices,
            )
        except ValueError as error:
            raise UserCodeError(f"parallelism.{error}") from error
        return self._split(cuts)

    def cut_like(self, first: Layout, operations: Sequence[str]) -> Layout:
        """Cut before the same operations as another m, if the graph has the same ones."""
        if self.operations() == list(operations):
            return self._split(first.cuts)
        return self._split(choose_cuts(self._held, len(first.cuts) + 1, marks=self._training.cuts))

    def cut_exactly(self, layout: Layout) -> None:
        """Hold the model as `layout` says. Raises `RecipeMismatch` when it is traced otherwise here."""
        self.hold(layout.microbatch_size)
        if self._held.graph_hash != layout.graph_hash:
            raise other_graph(self._held.graph_hash, layout.graph_hash, "the VM that measured first")
        if self._chain is None or list(self._chain.cuts) != layout.cuts:
            self._split(layout.cuts)

    def measure(self, section: int, section_s: float) -> SectionRow:
        """A section of the model as it was cut, with about `section_s` seconds for each of its times."""
        assert self._chain is not None, "the model was cut before"
        conditions = Conditions(
            training=self._training,
            seed=self.job.seed,
            numerics=self.job.numerics,
            num_micro_batches=self.job.global_batch_size // self._held.microbatch_size,
            device=self.device,
            section_s=section_s,
        )
        return measure_section(self._chain, section, conditions)

    @property
    def _held(self) -> TracedModel:
        assert self._traced is not None, "`hold` comes first"
        return self._traced

    def _split(self, cuts: Sequence[int]) -> Layout:
        self._chain = split(self._held, cuts)
        return layout_of(self._chain, self.job.numerics)


def layout_of(chain: Sections, numerics: Literal["exact", "fast"]) -> Layout:
    """How a model is cut, what crosses (bytes forwards, and of gradients backwards), and what is tied."""
    tied = Counter[tuple[int, ...]]()
    for name in chain.trainable_names:
        if name in chain.shared:
            of_one = 8 if numerics == "exact" else 4  # in a sum
            tied[chain.shared[name]] += of_one * chain.traced.tensors[name].numel()
    with_gradient = [[value for value in values if value.needs_grad] for values in chain.crossing]
    return Layout(
        microbatch_size=chain.traced.microbatch_size,
        graph_hash=chain.traced.graph_hash,
        cuts=list(chain.cuts),
        cut_bytes=[sum(value.size_bytes for value in values) for values in chain.crossing],
        grad_cut_bytes=[sum(value.size_bytes for value in values) for values in with_gradient],
        labels=[section.label for section in chain.sections],
        tied=[
            TiedParameters(sections=list(places), gradient_bytes=size_bytes)
            for places, size_bytes in tied.items()
        ],
    )


def device_name(device: torch.device, instruction_set: InstructionSet = "native") -> str:
    """The product's name; of a processor also the number of its cores, which its workers share, and the
    instructions that it is held to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line.partition(":")[2].strip() for line in _processor_lines() if line.startswith("model name")]
    held = "" if instruction_set == "native" else f", {instruction_set}"
    return f"{names[0] if names else platform.machine()}, {psutil.cpu_count()} cores{held}"


def memory_of(device: torch.device, job: JobSettings) -> int:
    """Bytes that one worker may use."""
    if device.type == "cuda":
        whole = usable_bytes(torch.cuda.get_device_properties(device).total_memory)
    else:
        whole = total_bytes() // job.workers_per_node
    return min(whole, job.device_memory_bytes or whole)


def _processor_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _code_sha256(entrypoint: str) -> str:
    """Over the files of the modules in the entrypoint's folder that are imported by now."""
    name = entrypoint.partition(":")[0]
    own = getattr(sys.modules.get(name), "__file__", None)
    digest = hashlib.sha256()
    if own is None:
        return digest.hexdigest()
    folder = Path(own).parents[name.count(".") + (Path(own).name == "__init__.py")]
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file in sorted(Path(file) for file in files if file and Path(file).is_relative_to(folder)):
        if file.suffix == ".py" and "site-packages" not in file.parts:
            data = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _prices(traced: TracedModel, device: torch.device, seconds: float) -> list[float] | None:
    memory_bytes = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 30
    nodes = compute_nodes(traced.graph)
    return measured_prices(
        nodes, device, precision=traced.precision, seconds=seconds, memory_bytes=memory_bytes
    )
