"""What the first worker does: see what there is to measure, and measure as much of it as is quick."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from ...protocol.messages import Recipe
from ...protocol.survey import Layout, SectionRow, Survey
from ...simulator.calibration.assembly import done_in, left
from ...simulator.calibration.microbatch_size import MAX_MICROBATCH_SIZE, STILL_IMPROVES
from ..execution.costs import executor_costs
from .shares import section_time_s, shares
from .subject import Subject, memory_of
from .wires import loopback

_PRICING_S = 5.0
_PROBE_S = 0.5
_EXECUTOR_S = 3.0


def survey(subject: Subject, *, seconds: float, several: bool = False) -> Survey:
    """Which m are worth a measurement, how the model is cut for each, and the rows that there was time for.

    `subject` holds the job's own m, or the least. If that was left open, m doubles while a section in the
    middle of the model saves 7 % of the time per sample and fits into memory twice over, a step leaves a
    micro-batch for each worker that the job may get, and `seconds` are not over. The last m measured is the
    first that is not worth it (Varuna §4.2). `several`: for people to look at, from the least on,
    whatever the job file says of m and of workers. Raises `UserCodeError` naming what of the job cannot be
    met.
    """
    return _Surveyor(subject, seconds, several).survey()


def rest(subject: Subject, found: Survey, seconds: float) -> list[SectionRow]:
    """The rows that a survey left, all measured here, in about `seconds`."""
    rows: list[SectionRow] = []
    open_shares = shares(found, done_in(found.rows), 1)
    count = sum(len(share.sections) for share in open_shares)
    layouts = {layout.microbatch_size: layout for layout in found.layouts}
    for share in open_shares:
        subject.cut_exactly(layouts[share.microbatch_size])
        rows += [subject.measure(section, section_time_s(seconds, count)) for section in share.sections]
    return rows


class _Surveyor:
    def __init__(self, subject: Subject, seconds: float, several: bool) -> None:
        self._subject = subject
        self._several = several
        self._began = time.perf_counter()
        self._until = self._began + seconds
        self._memory_bytes = memory_of(subject.device, subject.job)
        self._layouts: list[Layout] = []
        self._rows: list[SectionRow] = []

    def survey(self) -> Survey:
        subject, job = self._subject, self._subject.job
        basis = subject.basis()
        first = subject.cut(_PRICING_S)
        operations = subject.operations()
        probes = {first.microbatch_size: self._probe(first)}
        likely, before = first, None if self._several else probes[first.microbatch_size]
        m = subject.hold_least() if self._several else 2 * first.microbatch_size
        while self._is_worth_a_look(m, before):
            if m not in probes:
                subject.hold(m)
                probes[m] = self._probe(subject.cut_like(first, operations))
            if before is not None and _per_sample(probes[m]) > STILL_IMPROVES * _per_sample(before):
                break
            before, likely, m = probes[m], self._layouts[-1], 2 * m
        return Survey(
            basis=basis.to_json(),
            recipe=recipe_of(subject, first if job.microbatch_size is not None else likely),
            layouts=self._layouts,
            rows=self._whole_rows(),
            executor=self._executor(),
            wires=[loopback().to_json()],
            seconds=time.perf_counter() - self._began - sum(row.seconds for row in self._whole_rows()),
        )

    def _whole_rows(self) -> list[SectionRow]:
        """Without those of an m that is not done: its sections are to be measured side by side, or workers
        that share processors would make some of them look slower than this one."""
        done = done_in(self._rows)
        whole = {layout.microbatch_size for layout in self._layouts if not left(layout, done)}
        return [row for row in self._rows if row.microbatch_size in whole]

    def _executor(self) -> dict[str, float]:
        """What the worker's own code adds, if there is time to look: it rests for most of a second."""
        return asdict(executor_costs()) if time.perf_counter() + _EXECUTOR_S < self._until else {}

    def _probe(self, layout: Layout) -> SectionRow:
        """The section in the middle; and all others, if they are quick."""
        self._layouts.append(layout)
        probe = self._subject.measure(len(layout.cuts) // 2, _PROBE_S)
        self._rows.append(probe)
        others = left(layout, done_in(self._rows))
        remaining_s = self._until - time.perf_counter()
        if len(others) * probe.seconds < remaining_s / 2:
            each_s = section_time_s(remaining_s / 2, len(others))
            self._rows += [self._subject.measure(section, each_s) for section in others]
        return probe

    def _is_worth_a_look(self, m: int, before: SectionRow | None) -> bool:
        """Whether m should be measured, after `before` for half as many samples."""
        job = self._subject.job
        if job.microbatch_size is not None and not self._several:
            return False
        if job.global_batch_size % m or m > MAX_MICROBATCH_SIZE or time.perf_counter() > self._until:
            return False
        if job.global_batch_size // m < job.most_workers and not self._several:
            return False
        sizes = before.sizes if before is not None else {}
        passes = [sizes.get(name, 0) for name in ("forward_peak_bytes", "backward_peak_bytes")]
        running = sizes.get("activation_bytes", 0) + max(passes)
        return sizes.get("state_bytes", 0) + 2 * running <= self._memory_bytes


def recipe_of(subject: Subject, layout: Layout) -> Recipe:
    """The recipe's model part, if the job runs as `layout` says."""
    job = subject.job
    return Recipe(
        microbatch_size=layout.microbatch_size,
        num_micro_batches=job.global_batch_size // layout.microbatch_size,
        cuts=layout.cuts,
        graph_hash=layout.graph_hash,
        threads=job.threads,
        device_kind="cuda" if subject.device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
        bundle_sha256=job.bundle_sha256,
    )


def _per_sample(row: SectionRow) -> float:
    return row.times["forward_s"].median / row.microbatch_size
