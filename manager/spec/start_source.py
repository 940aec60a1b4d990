"""The checkpoint of another job that a job starts from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...protocol.hashes import short
from ...protocol.messages import Recipe
from .frozen import Frozen
from .paths import expanded
from .store_uri import is_absolute, place_of, uri_faults

_JOB = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


class StartSource(Frozen):
    """A resolved `checkpoint.start_from`: a job's folder in a store, and a step (None: the newest).

    `recipe` is the source job's, with which the new job continues.
    """

    uri: str
    endpoint: str | None = None
    region: str | None = None
    job: str
    step: int | None = None
    recipe: Recipe

    def differs(self, recipe: Recipe) -> str:
        """How the model of `recipe` differs; empty if it is the same."""
        then, now = self.recipe, recipe
        pairs = {
            "graph hash": (short(then.graph_hash), short(now.graph_hash)),
            "sections": (then.num_sections, now.num_sections),
            "cuts": (then.cuts, now.cuts),
            "microbatch_size": (then.microbatch_size, now.microbatch_size),
        }
        found = [f"{name} {a}, here {b}" for name, (a, b) in pairs.items() if a != b]
        if found and then.torch_version != now.torch_version:
            found.append(f"torch {then.torch_version}, here {now.torch_version}")
        return "; ".join(found)

    def other_bits(self, recipe: Recipe) -> str:
        """Why a job of this recipe cannot reach the same bits; empty if it may (its workers prove it)."""
        then, now = self.recipe, recipe
        pairs = {
            "resources.threads": (then.threads, now.threads),
            "device": (then.device_kind, now.device_kind),
        }
        return "; ".join(f"{name} {a}, here {b}" for name, (a, b) in pairs.items() if a != b)

    def other_choices(self, bits_hash: str | None) -> str:
        """A note on a job whose kernels agree with the source's but whose bits hash differs; may be empty."""
        then = self.recipe
        if bits_hash is None or then.kernels_hash is None or then.bits_hash in (None, bits_hash):
            return ""
        return (
            f"goes on from job {self.job} with another seed, data or optimizer: its weights will not be "
            "those of one run that was never interrupted"
        )


def split_step(start_from: str) -> tuple[str, int | None]:
    """(job or URI, step) of "JOB", "JOB@STEP", "URI" or "URI@STEP"."""
    match = re.fullmatch(r"(.+)@(\d{1,18})", start_from, re.DOTALL)
    return (match[1], int(match[2])) if match else (start_from, None)


def split_job(uri: str) -> tuple[str, str]:
    """(the store, the job) of the URI of a job's folder."""
    store, _, job = uri.rstrip("/").rpartition("/")
    return store, job


def start_faults(
    start_from: str | None, own_uri: str, endpoint: str | None, region: str | None
) -> list[tuple[str, str]]:
    """[(field, message)]: faults of a job file's `checkpoint.start_from`."""
    if start_from is None:
        return []
    place, _ = split_step(start_from)
    if "://" not in place:
        return []
    if not is_absolute(place):
        return [
            (
                "checkpoint.start_from",
                f"{start_from!r}: expected a job, file:///path, s3://bucket/prefix or az://container/prefix",
            )
        ]
    store, job = split_job(place)
    faults = uri_faults(store, *place_of(store, own_uri, endpoint, region))
    if faults or not _JOB.fullmatch(job):
        about = "expected the URI of a job's folder, which its head.json is in"
        if of_uri := [message for field, message in faults if field == "checkpoint.uri"]:
            return [("checkpoint.start_from", f"{of_uri[0]}; {about}")]
        if store.startswith("az://") and not own_uri.startswith("az://"):
            about = "a job starts from az:// if its own checkpoints are there, in the same account"
        return [("checkpoint.start_from", f"{start_from!r}: {about}")]
    return []


def resolved(start_from: str, folder: Path) -> str:
    """A path (one that begins with `.`, `/` or `~`) as a URI; relative paths are below `folder`.
    Raises `ValueError` if `~user` is not known."""
    place, step = split_step(start_from)
    if not place.startswith((".", "/", "~")):
        return start_from
    uri = (folder / expanded(place)).resolve().as_uri()
    return uri if step is None else f"{uri}@{step}"


def other_weights(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """How names and shapes of weights differ between a checkpoint and this model; empty if they do not."""
    found: list[str] = []
    lacks, surplus = [n for n in here if n not in there], [n for n in there if n not in here]
    if lacks:
        found.append(f"it lacks {_some(lacks)}")
    if surplus:
        found.append(f"it has {_some(surplus)}, which this model has not")
    for name in here:
        if name in there and list(there[name]) != list(here[name]):
            found.append(f"{name} is {list(there[name])} there, {list(here[name])} here")
    return "; ".join(found[:6]) + ("; ..." if len(found) > 6 else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
