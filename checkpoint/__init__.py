"""Checkpoints: parts and a manifest in an object store, listed by a head that changes by compare-and-swap.

In: safetensors files of single sections (`worker.sections.state` says what is in them), a generation number
and a store (`open_store`: a local folder, S3 or Azure Blob Storage). Out: published checkpoints, read back
section by section and verified, and exported weights. A checkpoint exists iff the head lists it; a writer of
a generation that is no longer open gets `Fenced`. Only the manager deletes: it alone calls `retire`,
`delete_parts` and `sweep`. Nothing here knows plans. Importing the package does not import torch: trainers
pack and unpack tensors with `makara.checkpoint.tensors`.
"""

from .calibrations import load_calibration, save_calibration
from .copying import copy_checkpoint, discard_copies, no_checkpoint, published
from .errors import (
    Cancelled,
    CheckpointError,
    Conflict,
    Corrupt,
    Fenced,
    HeadAhead,
    HeadCorrupt,
    HeadLacks,
    HeadMissing,
    Incomplete,
    InvalidKey,
    NoCredentials,
    NoReadable,
    NotFound,
    Retained,
    StoreRefused,
    StoreUnavailable,
    Superseded,
)
from .export import Export, export, fetch_export, weight_shapes, weights_sha256
from .head import Head, candidates, delete_parts, publish, read_head, retire
from .leftovers import Swept, sweep
from .manifest import CheckpointPart, Manifest, load_manifest
from .opening import open_generation, restart_generation
from .reader import read_part, read_parts
from .stores.azure_hosts import is_azure
from .stores.credentials import CREDENTIALS, credential_names, credentials_in, inherited
from .stores.places import check_writable, open_store
from .stores.store import Store, retrying
from .stores.uri import StoreUri
from .writer import Receipt, assemble, write_part

__all__ = [
    "CREDENTIALS",
    "Cancelled",
    "CheckpointError",
    "Conflict",
    "Corrupt",
    "Export",
    "Fenced",
    "Head",
    "HeadAhead",
    "HeadCorrupt",
    "HeadLacks",
    "HeadMissing",
    "Incomplete",
    "InvalidKey",
    "Manifest",
    "NoCredentials",
    "NoReadable",
    "NotFound",
    "CheckpointPart",
    "Receipt",
    "Retained",
    "Store",
    "StoreUri",
    "StoreRefused",
    "StoreUnavailable",
    "Superseded",
    "Swept",
    "assemble",
    "candidates",
    "check_writable",
    "copy_checkpoint",
    "credential_names",
    "credentials_in",
    "delete_parts",
    "discard_copies",
    "export",
    "fetch_export",
    "inherited",
    "is_azure",
    "load_calibration",
    "load_manifest",
    "open_generation",
    "open_store",
    "publish",
    "no_checkpoint",
    "published",
    "read_head",
    "read_part",
    "read_parts",
    "restart_generation",
    "retire",
    "retrying",
    "save_calibration",
    "sweep",
    "weight_shapes",
    "weights_sha256",
    "write_part",
]
