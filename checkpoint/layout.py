"""The keys of checkpoints' objects in the store.

```
<job>/sections/<step>-g<generation>/<section>.<part>.safetensors
<job>/manifests/<step>-g<generation>.json
<job>/head.json
<job>/export/<step>/model.safetensors
calibrations/<fingerprint>.json            shared by all jobs of the store
```
"""

from __future__ import annotations

import re

from ..protocol.messages import CheckpointRef

_TEMPORARY = r"\.tmp-\d+-[0-9a-f]{32}"  # the suffix of a local store's temporary files
_PART = re.compile(rf"sections/([^/]+)/(?:\d+\.\d+\.safetensors|{_TEMPORARY})")
_MANIFEST = re.compile(r"manifests/([^/]+)\.json")
_EXPORTED = re.compile(
    r"export/(0|[1-9]\d*)/"
    r"(?:model\.safetensors|model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json|export\.json|"
    rf"{_TEMPORARY})"
)
_LISTING = re.compile(rf"(?:manifests/)?{_TEMPORARY}")


def job_prefix(job: str) -> str:
    return f"{job}/"


def checkpoint_of(job: str, key: str) -> CheckpointRef | None:
    """The checkpoint that a part, a manifest, or a temporary file of a part belongs to; None for any other
    key."""
    match = _match(_PART, job, key) or _match(_MANIFEST, job, key)
    if match is None:
        return None
    try:
        return CheckpointRef.parse(match[1])
    except ValueError:
        return None


def export_step_of(job: str, key: str) -> int | None:
    """The step whose export a file belongs to; None for any other key."""
    match = _match(_EXPORTED, job, key)
    return int(match[1]) if match else None


def is_temporary_listing(job: str, key: str) -> bool:
    """Whether the key is a local store's temporary file of the head or a manifest."""
    return _match(_LISTING, job, key) is not None


def _match(pattern: re.Pattern[str], job: str, key: str) -> re.Match[str] | None:
    """Match what follows the job's prefix, if the key begins with it."""
    prefix = job_prefix(job)
    return pattern.fullmatch(key, len(prefix)) if key.startswith(prefix) else None


def head_key(job: str) -> str:
    return f"{job}/head.json"


def manifest_key(job: str, checkpoint: CheckpointRef) -> str:
    return f"{job}/manifests/{checkpoint}.json"


def parts_prefix(job: str, checkpoint: CheckpointRef) -> str:
    return f"{job}/sections/{checkpoint}/"


def part_key(job: str, checkpoint: CheckpointRef, section: int, part: int) -> str:
    return f"{parts_prefix(job, checkpoint)}{section}.{part}.safetensors"


def exports_prefix(job: str) -> str:
    return f"{job}/export/"


def export_prefix(job: str, step: int) -> str:
    return f"{exports_prefix(job)}{step}/"


def export_done_key(job: str, step: int) -> str:
    """The key of the object written last: the export exists iff this object does."""
    return f"{export_prefix(job, step)}export.json"


def calibration_key(fingerprint: str) -> str:
    return f"calibrations/{fingerprint}.json"
