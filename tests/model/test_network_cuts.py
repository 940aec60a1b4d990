"""Networks without repeated blocks are cut by work and memory; bounds on K are true."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import networks
import pytest
from makara.model.errors import UserCodeError
from makara.model.partition.cuts import MAX_SMALL_SECTIONS
from makara.model.partition.flops import compute_nodes, work_per_node
from makara.model.partition.partition import Sections, choose_cuts, most_sections, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from models import tied_gpt


def automatic(training: Training) -> Sections:
    traced = trace(training, 1)
    return split(traced, choose_cuts(traced))


def largest_shares(chain: Sections) -> tuple[float, float]:
    """Of all work, and of all parameters, what the largest section has."""
    traced = chain.traced
    work = work_per_node(compute_nodes(traced.graph), traced.precision)
    ends = [0, *chain.cuts, len(work)]
    by_work = [sum(work[start:stop]) / sum(work) for start, stop in pairwise(ends)]
    held = [sum(traced.tensors[name].nbytes for name in section.parameters) for section in chain.sections]
    return max(by_work), max(held) / sum(held)


@pytest.mark.parametrize(
    ("name", "training", "least", "most_work"),
    [
        ("12 convolutions", networks.plain_cnn, 10, 0.15),
        ("VGG16", lambda: networks.vgg16(narrower=1, hidden=4096, size=224), 12, 0.15),
        ("VGG16 for small pictures", lambda: networks.vgg16(narrower=1, hidden=512), 8, 0.25),
        (
            "DenseNet",
            lambda: networks.densenet(layers=(2, 2, 2, 2), size=64),
            8,
            0.6,
        ),  # its first convolution is half of the work
        ("a DLRM with six big tables", lambda: networks.dlrm(rows=20000, width=16), 6, 0.2),
    ],
)
def test_a_network_without_repeated_blocks_is_cut(
    name: str, training: Callable[[], Training], least: int, most_work: float
) -> None:
    chain = automatic(training())
    assert least <= chain.num_sections <= MAX_SMALL_SECTIONS, name
    assert largest_shares(chain)[0] <= most_work, name


def test_tables_are_shared_out_also_where_looking_up_takes_no_time() -> None:
    """Prices that were measured tell of forwards; what a table weighs in memory counts as much."""
    traced = trace(networks.dlrm(rows=20000, width=16), 1)
    nodes = compute_nodes(traced.graph)
    free = [0.0 if "embedding" in str(node.target) else 1.0 for node in nodes]
    chain = split(traced, choose_cuts(traced, work=free))
    assert chain.num_sections == automatic(networks.dlrm(rows=20000, width=16)).num_sections
    tables = [sum(name.startswith("tables") for name in s.parameters) for s in chain.sections]
    assert max(tables) == 1


def test_prices_do_not_decide_on_the_number_of_sections() -> None:
    traced = trace(networks.vgg16(), 1)
    nodes = compute_nodes(traced.graph)
    late = [0.0 if position < len(nodes) // 2 else 1.0 for position in range(len(nodes))]
    assert len(choose_cuts(traced, work=late)) == len(choose_cuts(traced))


@pytest.mark.parametrize("make", [networks.densenet, lambda: tied_gpt(layers=20)])
def test_every_number_of_sections_up_to_the_bound_is_made(make: Callable[[], Training]) -> None:
    traced = trace(make(), 2)
    most = most_sections(traced)
    assert most > len(choose_cuts(traced)) + 1
    for wanted in (*range(1, 20), most):
        chain = split(traced, choose_cuts(traced, wanted))
        assert chain.num_sections == wanted
    with pytest.raises(ValueError, match=rf"num_sections: {most + 1} is not in 1\.\.{most}, what the model"):
        choose_cuts(traced, most + 1)


def test_a_model_is_cut_for_the_stages_that_the_job_wants() -> None:
    traced = trace(tied_gpt(), 2)
    usual = len(choose_cuts(traced)) + 1
    assert choose_cuts(traced, least=usual) == choose_cuts(traced)
    assert len(choose_cuts(traced, least=usual + 3)) == usual + 2


def test_stages_that_cannot_be_are_refused() -> None:
    traced = trace(tied_gpt(), 2)
    most = most_sections(traced)
    wanted = f"pipeline_parallel_degree: {most + 1} is more than the {most} sections that the model's graph"
    with pytest.raises(ValueError, match=wanted):
        choose_cuts(traced, least=most + 1)
    with pytest.raises(ValueError, match=r"pipeline_parallel_degree: 3 is more than num_sections \(2\); rai"):
        choose_cuts(traced, 2, least=3)
    few = r"Training\.cuts: 1 marks make 2 sections, fewer than .*pipeline_parallel_degree \(3\); name more"
    with pytest.raises(UserCodeError, match=few):
        choose_cuts(traced, least=3, marks=["blocks.1"])
