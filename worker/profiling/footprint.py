"""How much memory calls need on their device: at most while they run, and afterwards.

On the CPU the allocator's own events are added up, which torch reports to its legacy profiler; nothing else
tells them in order and at little cost. That interface is private: used here only, checked with torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler_legacy,  # pyright: ignore[reportPrivateUsage]
    _enable_profiler_legacy,  # pyright: ignore[reportPrivateUsage]
)
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,  # pyright: ignore[reportPrivateUsage]
)

_MARK = "makara footprint"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of tensors beyond those that were there when the phase began."""

    peak_bytes: int
    kept_bytes: int  # at its end; below 0 if it freed more than it made


class Footprints:
    """A context manager; each `mark` within ends a phase. Afterwards `phases` has a `Footprint` for each.

    On the CPU only this thread's tensors count, and only those that are made within.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.phases: list[Footprint] = []
        self._cuda = torch.device(device).type == "cuda"
        self._level = 0

    def __enter__(self) -> Footprints:
        if self._cuda:
            self._begin_phase()
            return self
        config: Any = ProfilerConfig(
            ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            False,  # stacks
            False,  # floating-point operations
            False,  # modules
            _ExperimentalConfig(),
        )
        _enable_profiler_legacy(config)
        return self

    def mark(self) -> None:
        """End a phase; what follows the last mark does not count."""
        if not self._cuda:
            with torch.autograd.profiler.record_function(_MARK):
                return
        torch.cuda.synchronize()
        peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        self.phases.append(Footprint(peak - self._level, now - self._level))
        self._begin_phase()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._cuda:
            self._read(_disable_profiler_legacy())

    def _begin_phase(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._level = torch.cuda.memory_allocated()

    def _read(self, threads: Any) -> None:
        live = peak = level = 0
        for record in (record for records in threads for record in records):
            if record.kind() == "memory_alloc":
                live += record.cpu_memory_usage()
                peak = max(peak, live)
            elif record.kind() == "push" and record.name() == _MARK:
                self.phases.append(Footprint(peak - level, live - level))
                level = peak = live
