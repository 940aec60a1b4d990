"""What a machine's kernels make of a job's sections tells machines apart that train to other weights."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import models
import plain_models
import pytest
import torch
from core_script import spec as job_file
from in_process import SEED, M
from makara.manager.spec.job_spec import parse_spec, to_settings
from makara.model.data import Batches
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.protocol.instruction_sets import environment_of, processor_flags
from makara.protocol.messages import Phase
from makara.worker.profiling.subject import device_name
from makara.worker.sections.ranges import configure_torch
from makara.worker.sections.runtime import SectionRuntime
from makara.worker.trainer.fitness import bits_hash, kernels_hash, kinds
from test_trainers import Run

AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def chain_of(training: Training, precision: Precision = "fp32", m: int = M) -> Sections:
    traced = trace(training, m, SEED, precision)
    return split(traced, choose_cuts(traced))


def hash_of(training: Training, precision: Precision = "fp32") -> str:
    return hash_on(chain_of(training, precision), training)


def hash_on(chain: Sections, training: Training) -> str:
    return bits_hash(chain, training, Batches(training.dataset(), SEED, M, M).micro_batch(0, 0), SEED)


@pytest.fixture
def exact() -> Iterator[None]:
    configure_torch(1, "exact")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_machine_shows_the_same_bits_and_keeps_its_random_numbers(precision: Precision) -> None:
    before = torch.get_rng_state()
    first = hash_of(models.normed_mlp(), precision)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert hash_of(models.normed_mlp(), precision) == first
    assert first not in {
        hash_of(models.normed_mlp(), other) for other in ("fp32", "bf16") if other != precision
    }


@pytest.mark.usefixtures("exact")
def test_kernels_are_told_apart_from_the_seed_the_data_and_the_optimizer() -> None:
    def hashes(training: Training, batch: dict[str, torch.Tensor], seed: int) -> tuple[str, str]:
        chain = chain_of(training)
        return bits_hash(chain, training, batch, seed), kernels_hash(chain, training, batch)

    training = models.normed_mlp()
    batch = Batches(training.dataset(), SEED, M, M).micro_batch(0, 0)
    other = Batches(training.dataset(), SEED, M, M).micro_batch(1, 0)
    decayed = replace(training, optimizer=lambda named: torch.optim.SGD(named, lr=0.5))
    bits, kernels = hashes(training, batch, SEED)
    found = [hashes(decayed, batch, SEED), hashes(training, other, SEED), hashes(training, batch, SEED + 1)]
    assert {shown for _, shown in found} == {kernels}
    assert len({bits, *(shown for shown, _ in found)}) == 4
    without_loss = replace(training, loss=lambda output, batch: 2 * training.loss(output, batch))
    assert hashes(without_loss, batch, SEED)[1] != kernels


def test_sections_of_one_kind_are_looked_at_once() -> None:
    chain = chain_of(models.tied_gpt(layers=8), m=1)
    assert chain.num_sections > 6
    assert len(kinds(chain)) <= 4


SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = """
import sys
import torch
from test_fitness import chain_of, hash_on, weights_of
import models, user_models
from makara.worker.sections.ranges import configure_torch
import json
configure_torch(1, "exact")
made = {"tied_gpt": models.tied_gpt(dropout=0.0), "resnet": user_models.example("resnet").build()}
chains = {name: chain_of(training) for name, training in made.items()}
found = {name: [hash_on(chain, made[name]), weights_of(chain, made[name])] for name, chain in chains.items()}
print(json.dumps(found))
"""


def weights_of(chain: Sections, training: Training) -> str:
    """A hash of the weights after some steps."""
    from in_process import reference_of

    _, state = reference_of(training, chain, steps=3)
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_the_hash_differs_wherever_the_trained_weights_do() -> None:
    """Held to fewer instructions, this machine stands for older ones."""
    held = {
        "native": {},
        "avx2": environment_of("avx2", processor_flags()),
        "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    }
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for name, environment in held.items():
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **environment, "PYTHONPATH": str(SUPPORT)},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found[name] = json.loads(ran.stdout)
    for model in ("tied_gpt", "resnet"):
        hashes = [found[name][model][0] for name in held]
        weights = [found[name][model][1] for name in held]
        for one in range(3):
            for other in range(one):
                assert (hashes[one] == hashes[other]) == (weights[one] == weights[other]), (model, found)
        if "x86" in os.uname().machine:
            assert hashes[0] != hashes[2], "no vector instructions at all make a difference"


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_trainer_shows_its_bits_with_the_graph_that_it_traced(tmp_path: Path, numerics: str) -> None:
    run = Run(tmp_path, numerics=numerics)
    try:
        run.fleet.start("a", "b")
        run.fleet.wait_phase(Phase.IDLE, "a", "b")
        shown = {run.fleet.reports[worker].bits_hash for worker in "ab"}
        assert len(shown) == 1
        assert (shown == {None}) == (numerics == "fast")
    finally:
        run.fleet.close()


def test_an_instruction_set_is_part_of_the_job_and_of_what_its_calibration_is_of() -> None:
    spec = parse_spec(job_file(training={"instruction_set": "avx2"}))
    assert to_settings(spec, "j", "b0").instruction_set == "avx2"
    native, held = device_name(torch.device("cpu")), device_name(torch.device("cpu"), "avx2")
    assert held == f"{native}, avx2"


def test_a_processor_is_held_only_to_instructions_that_it_has() -> None:
    assert environment_of("native", AVX512) == {}
    assert environment_of("avx2", AVX512)["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment_of("avx2", AVX2) == environment_of("avx2", AVX512)
    assert environment_of("avx512", AVX2) == {}, "its kernels would be killed"
    assert set(environment_of("avx512", AVX512)) == {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"}


def test_flags_are_read_as_linux_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\n")
    assert processor_flags(path) == {"fpu", "avx2", "fma"}
    assert processor_flags(tmp_path / "none") == frozenset()


@pytest.mark.usefixtures("exact")
def test_a_section_that_refuses_made_up_inputs_is_compared_as_far_as_it_goes() -> None:
    """Found: every trainer of such a model ended, with torch's words and no cause."""
    drawing = plain_models.training(plain_models.Drawing)
    traced = trace(drawing, M, SEED, "fp32")
    chain = split(traced, choose_cuts(traced, 2, marks=("between",)))
    batch = Batches(drawing.dataset(), SEED, M, M).micro_batch(0, 0)
    assert bits_hash(chain, drawing, batch, SEED) == bits_hash(chain, drawing, batch, SEED)
    with pytest.raises(RuntimeError, match="p_in"):
        SectionRuntime(chain, 1, drawing, SEED, torch.device("cpu")).forward(
            0, 0, {value.name: torch.full(value.shape, -1.0) for value in chain.inputs_of(1)}, batch
        )
