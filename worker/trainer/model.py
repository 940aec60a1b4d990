"""Builds a job's model on a trainer: traces it, checks it against the recipe, splits it into sections."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...model.data import Batches, open_dataset
from ...model.errors import RecipeMismatch
from ...model.partition.partition import Sections, split
from ...model.tracing.trace import trace
from ...model.training import Training
from ...protocol.messages import JobSettings, Recipe
from ..execution.partial_sums import PartialSums
from ..execution.state import ModelState
from ..recipe import other_graph
from ..recovery.saver import SnapshotSlot
from ..sections.ranges import RangeRuntime, configure_torch, pick_device
from .fitness import bits_hash, kernels_hash


@dataclass(frozen=True)
class Model:
    """The parts of the user's code that a trainer needs once the recipe is known."""

    training: Training
    chain: Sections
    batches: Batches
    state: ModelState
    device: torch.device
    bits_hash: str | None  # `numerics: exact`: see `fitness`
    kernels_hash: str | None  # likewise
    seed: int
    slot: SnapshotSlot = field(default_factory=SnapshotSlot)

    def tested_bits(self) -> str:
        """What its kernels make of the sections now: another hash than before shows a faulty processor."""
        batch = self.batches.micro_batch(0, 0)
        return bits_hash(self.chain, self.training, batch, self.seed, self.device)


def build_model(training: Training, job: JobSettings, recipe: Recipe) -> Model:
    """Trace the model and check that this process can meet the recipe.

    Raises `RecipeMismatch` naming the field that differs, `UntraceableModel`, `UserCodeError`.
    """
    _check_versions(job, recipe)
    configure_torch(recipe.threads, job.numerics)
    traced = trace(training, recipe.microbatch_size, job.seed, job.precision)
    if traced.graph_hash != recipe.graph_hash:
        raise other_graph(traced.graph_hash, recipe.graph_hash)
    chain = split(traced, recipe.cuts)
    device = pick_device(recipe.device_kind)
    dataset = open_dataset(training, job.seed)
    batches = Batches(dataset, job.seed, job.global_batch_size, recipe.microbatch_size)
    sums = PartialSums(chain, recipe.num_micro_batches, job.numerics, device)
    state = ModelState(RangeRuntime(chain, training, job.seed, device), training.clip_grad_norm, sums)
    bits = kernels = None
    batch = batches.micro_batch(0, 0)
    if job.numerics == "exact":
        bits = bits_hash(chain, training, batch, job.seed, device)
        kernels = kernels_hash(chain, training, batch, device)
    else:
        state.bits = bits_hash(chain, training, batch, job.seed, device)
    return Model(training, chain, batches, state, device, bits, kernels, job.seed)


def _check_versions(job: JobSettings, recipe: Recipe) -> None:
    if torch.__version__ != recipe.torch_version:
        raise RecipeMismatch(
            f"torch_version: {torch.__version__} here, the recipe says {recipe.torch_version}"
        )
    if job.bundle_sha256 != recipe.bundle_sha256:
        raise RecipeMismatch("bundle_sha256: the job's code is not the one that the recipe was made from")
