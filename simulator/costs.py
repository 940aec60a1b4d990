"""Costs of morphs and checkpoints, apart from steps, for replays of whole jobs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from .source_lines import read_json
from .validation import FileFault, NotNegative, Rate, validated


class InvalidCosts(FileFault):
    """Invalid costs; the message names the line, the field and what would be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", defer_build=True))
class MorphCosts:
    """Seconds, and bytes per second.

    Default times are medians of `makara demo --steps 120` (six morphs of six local VMs on a two-core machine,
    gloo, torch 2.13), where hardly any bytes move. Moving bytes adds to them: between peers at the
    calibration's inter-VM bandwidth, to and from the store and to host memory at the rates below, which are
    assumptions, not measurements.
    """

    boot_s: NotNegative = 0.8
    """From the cloud's acceptance until the VM's agent joins; a minute or two on a real cloud."""
    start_s: NotNegative = 6.1
    """Then until a trainer is idle: interpreter, torch, the user's imports; measured with two on one core."""
    trace_s: NotNegative = 0.5
    """Tracing the model under the recipe."""
    profile_s: NotNegative = 2.7
    """Tracing and calibrating, once a job. Varuna §4.3: under a minute for 10 billion parameters."""
    detect_s: NotNegative = 1.0
    """From a death until the manager knows of it: at most one tick of the manager; peers report sooner."""
    plan_s: NotNegative = 0.015
    """Asking the planner (phase `decide` of a morph)."""
    prepare_s: NotNegative = 0.03
    """From the orders until every member is prepared."""
    open_s: NotNegative = 0.005
    """Swapping the head in the store."""
    form_s: NotNegative = 0.25
    """Rendezvous, agreement, groups and the last barrier, without loading."""
    publish_s: NotNegative = 0.1
    """Receipts, manifest and head, once all parts are stored."""
    store_bytes_per_s: Rate = 1e8
    """One worker to or from the store."""
    snapshot_bytes_per_s: Rate = 3e9
    """One worker's copy to host memory, which delays its steps (Varuna §4.5 writes to the local disk)."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> MorphCosts:
        """Read costs from a JSON object; missing ones keep their defaults.

        The object has fields of this class, or is what `makara status JOB --json` prints; then the costs are
        taken from that job's morphs.
        """
        return read_json(text, cls._of, InvalidCosts)

    @classmethod
    def _of(cls, value: Any) -> MorphCosts:
        is_job = isinstance(value, Mapping) and "morphs" in value
        return cls.of_job(value) if is_job else validated(value, cls, InvalidCosts, "costs")

    @classmethod
    def of_job(
        cls, job: Mapping[str, Any], average: Callable[[Sequence[float]], float] = statistics.median
    ) -> MorphCosts:
        """Averages over the morphs of a job that ran, without loading, and over VMs that came while it
        ran: from when they had joined, for a request may have waited for long.

        Raises `InvalidCosts`.
        """
        try:
            formed = [morph for morph in job["morphs"] if "form" in morph["phases_s"]]
            # Before other changes the old plan goes on to the end of a step, and `form` has that wait in it.
            sudden = [morph for morph in formed if morph["cause"].startswith("lost ")] or formed
            came = list(_newcomers(job.get("vms", ()), formed))
            taken = {
                "start_s": [m["at"] - m["phases_s"]["decide"] - vm["joined_at"] for m, vm in came],
                "trace_s": [0.0 for _ in came],  # whoever is ready has traced: it is in `start_s`
                # New VMs are first gathered for some seconds, which is not planning time.
                "plan_s": [m["phases_s"]["decide"] for m in formed if not m["cause"].endswith(" joined")],
                "prepare_s": [m["phases_s"]["prepare"] for m in formed],
                "open_s": [m["phases_s"]["open"] for m in formed],
                "form_s": [max(0.0, m["phases_s"]["form"] - m["inside_form_s"]["load"]) for m in sudden],
            }
            averages = {name: max(0.0, average(found)) for name, found in taken.items() if found}
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidCosts(f"morphs: not as `makara status --json` prints them: {error!r}") from error
        return validated(averages, cls, InvalidCosts, "costs")


def _newcomers(
    vms: Sequence[Mapping[str, Any]], formed: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each morph that took VMs in, with each of these VMs."""
    joined = {vm["vm"]: vm for vm in vms if vm["joined_at"] is not None}
    for morph in formed:
        workers, found, _ = str(morph["cause"]).partition(" joined")
        for worker in workers.split(", ") if found else ():
            vm = joined.get(worker.rpartition(".")[0])
            if vm is not None:
                yield morph, vm
