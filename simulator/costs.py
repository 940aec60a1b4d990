"""Costs of morphs and checkpoints, apart from steps, for replays of whole jobs."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .source_lines import FileFault, parse_json


class InvalidCosts(FileFault):
    """Invalid costs; the message names the line, the field and what would be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphCosts:
    """Seconds, and bytes per second. Raises `InvalidCosts` naming the field.

    Default times are medians of `makara demo --steps 120` (six morphs of six local VMs on a two-core machine,
    gloo, torch 2.13), where hardly any bytes move. Moving bytes adds to them: between peers at the
    calibration's inter-VM bandwidth, to and from the store and to host memory at the rates below, which are
    assumptions, not measurements.
    """

    boot_s: float = 0.8
    """From the cloud's acceptance until the VM's agent joins; a minute or two on a real cloud."""
    start_s: float = 6.1
    """Then until a trainer is idle: interpreter, torch, the user's imports; measured with two on one core."""
    trace_s: float = 0.5
    """Tracing the model under the recipe."""
    profile_s: float = 2.7
    """Tracing and calibrating, once a job. Varuna §4.3: under a minute for 10 billion parameters."""
    detect_s: float = 1.0
    """From a death until the manager knows of it: at most one tick of the manager; peers report sooner."""
    plan_s: float = 0.015
    """Asking the planner (phase `decide` of a morph)."""
    prepare_s: float = 0.03
    """From the orders until every member is prepared."""
    open_s: float = 0.005
    """Swapping the head in the store."""
    form_s: float = 0.25
    """Rendezvous, agreement, groups and the last barrier, without loading."""
    publish_s: float = 0.1
    """Receipts, manifest and head, once all parts are stored."""
    store_bytes_per_s: float = 1e8
    """One worker to or from the store."""
    snapshot_bytes_per_s: float = 3e9
    """One worker's copy to host memory, which delays its steps (Varuna §4.5 writes to the local disk)."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            rate = name.endswith("_per_s")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidCosts(f"{name}: {value!r} is not a number")
            if value < 0 or (rate and value == 0):
                raise InvalidCosts(f"{name}: {value!r} is not {'a rate > 0' if rate else 'a time >= 0'}")

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> MorphCosts:
        """Read costs from a JSON object; missing ones keep their defaults.

        The object has fields of this class, or is what `makara status JOB --json` prints; then the costs are
        taken from that job's morphs.
        """
        value = parse_json(text, InvalidCosts)
        try:
            return cls._of(value)
        except InvalidCosts as error:
            raise error.located(text) from error

    @classmethod
    def _of(cls, value: object) -> MorphCosts:
        if not isinstance(value, Mapping):
            raise InvalidCosts(f"costs: expected an object, got {type(value).__name__}")
        given: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        if "morphs" in given:
            return cls.of_job(given)
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            close = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidCosts(f"{unknown[0]}: unknown field{hint} (known are {', '.join(known)})")
        return cls(**given)

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> MorphCosts:
        """Medians over the morphs of a job that ran, without loading. Raises `InvalidCosts`."""
        try:
            formed = [morph for morph in job["morphs"] if "form" in morph["phases_s"]]
            taken = {
                # New VMs are first gathered for some seconds, which is not planning time.
                "plan_s": [m["phases_s"]["decide"] for m in formed if not m["cause"].endswith(" joined")],
                "prepare_s": [m["phases_s"]["prepare"] for m in formed],
                "open_s": [m["phases_s"]["open"] for m in formed],
                "form_s": [max(0.0, m["phases_s"]["form"] - m["inside_form_s"]["load"]) for m in formed],
            }
            return cls(**{name: statistics.median(values) for name, values in taken.items() if values})
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidCosts(f"morphs: not as `makara status --json` prints them: {error!r}") from error
