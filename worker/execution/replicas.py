"""Finds hosts of a section whose state differs: memory, a processor or a link changed bits without an error.

A section's state is constant from one step's application to the next. A helper thread hashes it meanwhile,
where it lies: a portion in each step, and all of it where a checkpoint is taken. The hash of the state after
step s is in the commit of step s + 2 (its vote is given before that of step s + 1 can be complete), as a term
that adds up to zero over hosts with equal hashes. So no commit waits for a hash.

Who owns what: from `begin` to `end` the state is only read, by the step's operations and by the helper. `end`
returns when the helper reads no more, and only then may the compute thread apply.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...model.seeds import seed64
from ...pipeline.contributions import WORD
from ...pipeline.plan import Plan
from ...protocol.messages import Corruption
from ..sections.runtime import SectionRuntime
from ..sections.state_hash import ROUND, Stopped, changing_hash, section_hash
from .blocking import Interrupted
from .staging import Staged, Stager

Hashes = Mapping[int, int]
"""The hash of each section that a worker hosts."""

Compared = Mapping[int, Sequence[Sequence[int]]]
"""For each section, the groups of ranks among its hosts that must hold the same bits."""

Origins = Sequence[dict[int, str]]
"""For each rank, {section that was copied: the worker whose state it is}, until all bytes were compared."""

Differing = Mapping[int, tuple[set[int], bool]]
"""For each section whose hosts differ, the suspected ranks, and whether most hosts agree."""


class CorruptState(Interrupted):
    """Hosts of a section hold different state: no state of the generation counts any more."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(
            f"step {corruption.step}: hosts of sections {corruption.sections} hold different state;"
            f" suspected: {', '.join(corruption.suspects) or 'none'}"
        )
        self.corruption = corruption


def compared_hosts(plan: Plan, bits: Sequence[str]) -> dict[int, list[list[int]]]:
    """For each section, the groups of hosts that compute the same bits: those whose `bits` are equal (one
    value for each rank). A host without an equal is in no group."""
    groups: dict[int, list[list[int]]] = {}
    for section in range(plan.num_sections):
        by_bits: dict[str, list[int]] = {}
        for rank in plan.hosts(section):
            by_bits.setdefault(bits[rank], []).append(rank)
        groups[section] = [ranks for ranks in by_bits.values() if len(ranks) > 1]
    return groups


def differing(compared: Compared, hashes: Sequence[Hashes], origins: Origins = ()) -> Differing:
    """The sections whose hosts differ. `hashes`: of each rank.

    A host is suspected if it differs from most hosts of its group; without a majority, the whole group is. A
    host and the copies of its state count once: what was wrong in it is wrong in its copies.
    """
    found: dict[int, tuple[set[int], bool]] = {}
    for section, groups in compared.items():
        for ranks in groups:
            shown = {rank: hashes[rank].get(section) for rank in ranks}
            states = {(shown[rank], origins[rank].get(section, rank) if origins else rank) for rank in ranks}
            [(most, count), *others] = Counter(value for value, _ in states).most_common()
            if not others:
                continue
            majority = 2 * count > len(states)
            suspects = {rank for rank in ranks if not majority or shown[rank] != most}
            before, whole = found.get(section, (set(), True))
            found[section] = before | suspects, whole and majority
    return found


def corruption_of(
    generation: int,
    step: int,
    sections: Sequence[int],
    members: Sequence[str],
    found: Differing,
) -> Corruption:
    """The report of a difference; `found`: by `differing`, empty if hashes could not be exchanged."""
    suspects = sorted({rank for ranks, _ in found.values() for rank in ranks})
    return Corruption(
        generation=generation,
        step=step,
        sections=list(sections),
        suspects=[members[rank] for rank in suspects],
        has_majority=bool(found) and all(majority for _, majority in found.values()),
    )


class ReplicaCheck:
    """One worker's hashes of its sections, in one generation. Owned by the compute thread."""

    def __init__(
        self,
        sections: Mapping[int, SectionRuntime],
        compared: Compared,
        rank: int,
        device: torch.device,
        origins: Origins = (),
    ) -> None:
        """`origins` are emptied as soon as all bytes were compared: wrong copies have been found by then."""
        self.compared = compared
        self.origins = origins
        self.hashes: Hashes | None = None
        """Of the state before the newest application; None before the generation's first one."""
        self.cpu_s = 0.0
        """Processor time of all hashing so far."""
        self._factors = {section: _factor(section, groups, rank) for section, groups in compared.items()}
        self._sections = {index: section for index, section in sections.items() if self._factors[index]}
        self._stager = Stager(device)
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "state-hashes")
        self._running: Future[Hashes | None] | None = None
        self._is_whole = False
        """Whether `_running` hashes all of the state."""
        self._first: int | None = None

    def begin(self, step: int, *, whole: bool = False) -> Future[Hashes | None]:
        """Hash the state after `step` steps, all of it if `whole`; nothing new if that was begun, or all is
        being hashed. The result is None if the generation ended before."""
        assert self._running is None or self._is_whole or not whole, "a portion is not all of the state"
        self._first = step if self._first is None else self._first
        if step == self._first + ROUND + 2:  # the last portion was in a commit
            for origins in self.origins:
                origins.clear()
        if self._running is None:
            self._is_whole = whole
            moment = self._stager.moment()
            self._running = self._thread.submit(self._hash, None if whole else step, moment)
        return self._running

    def end(self) -> None:
        """Wait until the helper reads no more; the state may be changed then."""
        running, self._running = self._running, None
        if running is None:
            return
        found = running.result()
        assert found is not None, "hashes are stopped after the last step only"
        began = time.thread_time()
        self.hashes = {
            index: seed64("state and buffers", value, changing_hash(self._sections[index]))
            for index, value in found.items()
        }
        self.cpu_s += time.thread_time() - began

    def terms(self) -> list[int]:
        """For each section, what adds up to zero over its hosts if their hashes are equal."""
        hashes = self.hashes or {}
        return [factor * hashes.get(section, 0) & WORD for section, factor in self._factors.items()]

    def close(self) -> None:
        """Give up what is not hashed yet; the helper reads no more on return."""
        self._stopped.set()
        self._thread.shutdown(wait=True)

    def _hash(self, step: int | None, moment: Any) -> Hashes | None:
        began = time.thread_time()

        def to_host(piece: Tensor) -> Tensor:
            return piece if piece.device.type == "cpu" else self._stager.to_host(Staged(piece, moment))

        try:
            with self._stager.following(moment):
                return {
                    index: section_hash(section, step, to_host, self._stopped.is_set)
                    for index, section in self._sections.items()
                }
        except Stopped:
            return None
        finally:
            self.cpu_s += time.thread_time() - began


def _factor(section: int, groups: Sequence[Sequence[int]], rank: int) -> int:
    """By which a rank's hash of the section counts: those of a group add up to zero, and are known to all."""
    for ranks in groups:
        if rank in ranks:
            others = [seed64("replica", section, other) | 1 for other in ranks[:-1]]
            return [*others, -sum(others) & WORD][ranks.index(rank)]
    return 0
