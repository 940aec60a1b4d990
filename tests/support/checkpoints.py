"""Small checkpoints for tests, written the way a trainer writes them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import torch
from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.blob import BlobClient
from conftest import StoreAddress
from makara.checkpoint import (
    Manifest,
    Receipt,
    Store,
    assemble,
    load_manifest,
    open_generation,
    publish,
    read_parts,
    write_part,
)
from makara.checkpoint.stores.azure import _upload_id
from makara.checkpoint.tensors import pack
from makara.protocol.messages import CheckpointRef

JOB = "gpt"
NUM_SECTIONS = 3
NUM_PARTS = 2


def section_tensors(section: int, part: int, step: int) -> dict[str, torch.Tensor]:
    """A weight, a buffer and optimizer state, different for each section, part and step."""
    name = f"block{section}.{part}"
    seeded = torch.Generator().manual_seed(1000 * step + 10 * section + part)
    return {
        f"weights/{name}.weight": torch.randn(3, 4, generator=seeded),
        f"buffers/{name}.count": torch.tensor(step),
        f"optimizer/{name}.weight/exp_avg": torch.randn(3, 4, generator=seeded),
    }


def read_sections(
    store: Store, job: str, checkpoint: CheckpointRef, sections: Collection[int]
) -> dict[tuple[int, int], bytes]:
    parts = load_manifest(store, job, checkpoint).parts
    return read_parts(store, [part for part in parts if part.section in sections])


def write_parts(
    store: Store, checkpoint: CheckpointRef, sections: Sequence[int] = range(NUM_SECTIONS)
) -> list[Receipt]:
    return [
        write_part(
            store,
            JOB,
            checkpoint,
            section,
            part,
            NUM_PARTS,
            pack(section_tensors(section, part, checkpoint.step)),
            metadata={"scale": 0.5 * section},
        )
        for section in sections
        for part in range(NUM_PARTS)
    ]


RECIPE: Mapping[str, Any] = {"microbatch_size": 2, "cuts": [3, 5], "graph_hash": "abc", "note": None}


def assembled(
    receipts: Sequence[Receipt], checkpoint: CheckpointRef, recipe: Mapping[str, Any] = RECIPE
) -> Manifest:
    return assemble(
        receipts,
        job=JOB,
        checkpoint=checkpoint,
        num_sections=NUM_SECTIONS,
        data_position=64 * checkpoint.step,
        recipe=recipe,
    )


def written(store: Store, step: int, generation: int, recipe: Mapping[str, Any] = RECIPE) -> Manifest:
    """A checkpoint whose parts are stored, not published."""
    checkpoint = CheckpointRef(step=step, generation=generation)
    return assembled(write_parts(store, checkpoint), checkpoint, recipe)


def published(store: Store, step: int, generation: int, recipe: Mapping[str, Any] = RECIPE) -> Manifest:
    """A checkpoint that exists; opens its generation."""
    open_generation(store, JOB, generation)
    manifest = written(store, step, generation, recipe)
    publish(store, JOB, generation, manifest)
    return manifest


def begin_write(address: StoreAddress, key: str) -> str:
    """A writer begins to store an object and dies; the key that the store knows its write by."""
    if address.endpoint is None:
        folder = Path(unquote(urlsplit(address.uri).path), key).parent
        folder.mkdir(parents=True, exist_ok=True)
        name = f".tmp-1-{uuid.uuid4().hex}"
        (folder / name).write_bytes(b"half a part")
        return f"{key.rpartition('/')[0]}/{name}"
    if address.uri.startswith("az://"):
        container, _, prefix = address.uri.removeprefix("az://").partition("/")
        found = AzureNamedKeyCredential("makara", os.environ["AZURE_STORAGE_KEY"])
        assert address.endpoint is not None
        with BlobClient(address.endpoint, container, f"{prefix}/{key}", credential=found) as blob:
            blob.stage_block(f"{_upload_id(time.time())}-000000", b"half a part")
        return key
    bucket, _, prefix = address.uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=address.endpoint, region_name=address.region)
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")
    return key
