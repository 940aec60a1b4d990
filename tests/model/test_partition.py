"""Cuts: balanced, where little crosses, the same every time; sections say all that they take and give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from makara.model.partition.flops import compute_nodes, work_per_node
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import TracedModel, trace
from makara.model.training import Training
from models import skip_model, tied_gpt, untied_mlp


def chain_of(training: Training, num_sections: int | None = None) -> Sections:
    traced = trace(training, 2)
    return split(traced, choose_cuts(traced, num_sections))


def test_only_the_residual_stream_crosses_a_transformers_cuts() -> None:
    chain = chain_of(tied_gpt())
    assert chain.num_sections >= 8  # half-blocks
    for values in chain.crossing:
        assert [(value.shape, value.dtype, value.needs_grad) for value in values] == [
            ((2, 12, 32), "float32", True)
        ]
    assert chain.shared == {"embed.weight": (0, chain.num_sections - 1)}


def test_cuts_are_deterministic() -> None:
    assert choose_cuts(trace(tied_gpt(), 2)) == choose_cuts(trace(tied_gpt(), 2))


@pytest.mark.parametrize("num_sections", [1, 2, 3, 4])
def test_work_is_nearly_equal(num_sections: int) -> None:
    traced = trace(tied_gpt(layers=8), 2)
    cuts = choose_cuts(traced, num_sections)
    assert len(cuts) == num_sections - 1
    shares = section_work(traced, cuts)
    assert max(shares) < 1.35 * sum(shares) / num_sections


def section_work(traced: TracedModel, cuts: list[int]) -> list[float]:
    work = work_per_node(compute_nodes(traced.graph), traced.precision)
    ends = [0, *cuts, len(work)]
    return [sum(work[start:stop]) for start, stop in pairwise(ends)]


@pytest.mark.parametrize("wanted", [0, 1000])
def test_an_impossible_number_of_sections_is_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match=f"num_sections: {wanted} is not in 1.."):
        choose_cuts(trace(tied_gpt(), 2), wanted)


@pytest.mark.parametrize("cuts", [[5, 3], [0], [4, 4], [100000]])
def test_cuts_of_another_graph_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="cuts"):
        split(trace(untied_mlp(), 2), cuts)


@pytest.mark.parametrize("make", [tied_gpt, untied_mlp, skip_model])
def test_what_a_section_takes_was_given_and_everything_is_somewhere(make: Callable[[], Training]) -> None:
    chain = chain_of(make())
    for section in chain.sections:
        received = {value.name for value in chain.inputs_of(section.index)}
        sent = {value.name for value in chain.outputs_of(section.index + 1)}
        assert set(section.inputs) <= received
        assert set(section.outputs) <= sent
        assert sent <= received | set(section.outputs)
    held = {name for section in chain.sections for name in section.parameters}
    assert held == set(chain.parameter_names)
    for name in chain.parameter_names:
        places = [section.index for section in chain.sections if name in section.parameters]
        assert places
        assert len(places) == 1 or chain.shared[name] == tuple(places)


def test_a_value_that_skips_sections_is_relayed_beside_them() -> None:
    chain = chain_of(skip_model(), 4)
    first = {value.name for value in chain.crossing[0]}
    relayed = first & {value.name for value in chain.crossing[-1]}
    assert relayed, "the embedding is returned, so it crosses every cut"
    assert {value.dtype for values in chain.crossing for value in values} == {"float32"}
    assert all("tokens" in section.batch for section in chain.sections), "each makes the mask for itself"
