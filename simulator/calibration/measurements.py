"""All measurements of a model on one kind of hardware: calibrations for several m, links, noise.

Stored as readable JSON under a fingerprint of what they depend on, and reused by every job with the same
fingerprint (Varuna §4.3: once for a model on its hardware).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import ModelWrapValidatorHandler, model_validator
from pydantic.dataclasses import dataclass

from ..source_lines import read_json
from ..validation import Count, FieldFaults, NotNegative, validated
from .data import Calibration, InvalidCalibration, Record
from .links import AllReduce, MeasuredWire, fitted_links
from .statistics import Figure

TIMES = ("forward_s", "backward_s", "optimizer_s")
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis(Record):
    """What measurements depend on; a job with an equal basis reuses them."""

    graph_hash: str
    """Hash of the model traced for micro-batches of `microbatch_size`."""
    microbatch_size: Count
    """m of the job file, or 1."""
    global_batch_size: Count
    num_sections: Count
    """K of the job file; 0 if the cuts were left to Makara."""
    code_sha256: str
    """Hash of the Python files that the job's entrypoint imports: loss and optimizer are in no graph."""
    precision: str
    numerics: str
    threads: Count
    device_kind: str
    device_name: str
    torch_version: str
    makara_version: str
    least_sections: Count = 0
    """If Makara chose the cuts and the job file fixes P: that P, which K must reach; else 0."""
    worker_sections: Count = 0
    """If Makara chose the cuts and only the job's number of workers allows them: the bound on K; else 0."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the fields; the key under which the measurements are stored."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Record):
    """The measurements for one m: graph and cuts, the calibration, and the figures that it is made of."""

    graph_hash: str
    cuts: tuple[Count, ...]
    """Positions in the graph before which sections 1..K-1 begin."""
    figures: Mapping[str, tuple[Figure, ...]]
    """{name of `TIMES`: one figure per section}."""
    calibration: Calibration

    @model_validator(mode="after")
    def _has_what_belongs_to_each_section(self) -> Self:
        num_sections = self.calibration.num_sections
        faults = [
            (f"figures.{name}", f"unknown key (accepted here: {', '.join(TIMES)})")
            for name in self.figures
            if name not in TIMES
        ]
        if len(self.cuts) != num_sections - 1:
            faults.append(("cuts", f"expected {num_sections - 1}, got {len(self.cuts)}"))
        for name in TIMES:
            if (count := len(self.figures.get(name, ()))) != num_sections:
                faults.append(
                    (f"figures.{name}", f"expected {num_sections}, one for each section, got {count}")
                )
        if faults:
            raise FieldFaults(faults)
        return self

    @property
    def microbatch_size(self) -> int:
        return self.calibration.microbatch_size

    @property
    def seconds_per_sample(self) -> float:
        """Σ F_i(m) / m."""
        return sum(self.calibration.forward_s) / self.microbatch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements(Record):
    """Rows for several m, at least one, and links."""

    required_in_files: ClassVar[tuple[str, ...]] = ("format", "seconds", "wires", "allreduces")

    format: Literal[1] = 1
    basis: Basis | None
    """None for a bare calibration, which does not say what it depends on."""
    seconds: NotNegative = 0.0
    """How long measuring took, summed over workers."""
    wires: tuple[MeasuredWire, ...] = ()
    allreduces: tuple[AllReduce, ...] = ()
    rows: tuple[Row, ...]
    """Ascending m."""

    @model_validator(mode="after")
    def _rows_ascend(self) -> Self:
        if not self.rows:
            raise FieldFaults([("rows", "expected at least one, got none")])
        if list(self.sizes) != sorted(set(self.sizes)):
            raise FieldFaults([("rows", f"expected ascending microbatch_size, got {list(self.sizes)}")])
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every m that was measured."""
        return tuple(row.microbatch_size for row in self.rows)

    def at(self, m: int) -> Calibration:
        """The calibration for micro-batches of m. Raises `InvalidCalibration` naming the measured m."""
        return self.row(m).calibration

    def row(self, m: int) -> Row:
        for row in self.rows:
            if row.microbatch_size == m:
                return row
        measured = ", ".join(map(str, self.sizes))
        raise InvalidCalibration(f"microbatch_size: {m} was not measured; measured are {measured}")

    def with_links(self, wires: Sequence[MeasuredWire], allreduces: Sequence[AllReduce]) -> Measurements:
        """The same measurements and calibrations with these links; a kind (within a VM, between VMs) that is
        missing is assumed equal to the other."""
        inter_vm, intra_vm = fitted_links(wires, allreduces)
        rows = tuple(
            replace(row, calibration=replace(row.calibration, inter_vm=inter_vm, intra_vm=intra_vm))
            for row in self.rows
        )
        return replace(self, rows=rows, wires=tuple(wires), allreduces=tuple(allreduces))

    @model_validator(mode="wrap")
    @classmethod
    def _fits_its_fingerprint(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, Mapping):
            return read(value)
        found = read({name: item for name, item in value.items() if name != "fingerprint"})
        if value.get("fingerprint", "") != found.fingerprint:
            raise FieldFaults([("fingerprint", "it is not that of the basis")])
        return found

    @property
    def fingerprint(self) -> str | None:
        """That of the basis, if there is one."""
        return None if self.basis is None else self.basis.fingerprint

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "fingerprint": self.fingerprint} | Record.to_json(self)

    def to_text(self) -> str:
        """The JSON as text, one short line per entry; `from_json` reads it."""
        return pretty(self.to_json()) + "\n"

    @classmethod
    def from_json(cls, value: object) -> Measurements:
        """Read the object (or its text, then an error names its line), or a bare `Calibration`."""
        if isinstance(value, str):
            return read_json(value, cls.from_json, InvalidCalibration)
        if isinstance(value, Mapping) and "forward_s" in value:
            return of_one(Calibration.from_json(value))
        return validated(value, cls, InvalidCalibration, "calibration")


def of_one(calibration: Calibration) -> Measurements:
    """Measurements that hold one calibration and nothing of how it came about."""
    figures = {
        name: tuple(Figure(value, 0.0, 1, 0) for value in getattr(calibration, name)) for name in TIMES
    }
    row = Row(
        calibration=calibration, graph_hash="", cuts=(0,) * (calibration.num_sections - 1), figures=figures
    )
    return Measurements(basis=None, rows=(row,))


def pretty(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits on a line is on one."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or indent + len(line) <= _WIDTH:
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        entries: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        parts = [f"{json.dumps(key)}: {pretty(item, indent + 1)}" for key, item in entries.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + "}"
    entries_of_list: Sequence[Any] = value  # pyright: ignore[reportUnknownVariableType]
    rows = [inner + pretty(item, indent + 1) for item in entries_of_list]
    return "[\n" + ",\n".join(rows) + "\n" + " " * indent + "]"
