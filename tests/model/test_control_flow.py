"""The control flow of torch: counted by what it runs, and in a dispatch mode what it is without."""

from __future__ import annotations

import control_flow
import pytest
import torch
from coupled_models import WIDTH, Net, sound
from makara.model.partition.flops import FLOPS_PER_BYTE, compute_nodes, work_per_node
from makara.model.torch_private.higher_order import higher_order_name, run_as_python
from makara.model.tracing.trace import trace
from torch import Tensor, nn

ROWS = 8  # of time
LAYERS = {"cond": control_flow.Branches, "scan": control_flow.Scans, "map_impl": control_flow.Maps}


class Small(Net):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer()])


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("name", LAYERS)
def test_work_is_that_of_the_heavier_branch_or_of_all_turns(name: str) -> None:
    """Found: of the first branch, and of one turn."""
    nodes = compute_nodes(trace(sound(model=lambda: Small(LAYERS[name])), 2).graph)
    found = [work for node, work in zip(nodes, work_per_node(nodes, "fp32"), strict=True)
             if higher_order_name(node.target) == name]  # fmt: skip
    flops = 2 * 2 * ROWS * WIDTH * WIDTH  # of the linear layer, for two samples
    weights = 4 * WIDTH * (WIDTH + 1) * (1 if name == "cond" else ROWS)  # bytes that it reads, at least
    assert len(found) == 1
    assert found[0] > flops + FLOPS_PER_BYTE * weights


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("name", LAYERS)
def test_run_as_python_gives_the_gradients_that_torch_gives(name: str) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name]()
    layer.eval()  # no dropout
    x = torch.randn(2, ROWS, WIDTH, requires_grad=True)
    wanted = [x, *layer.parameters()]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x).square().sum(), wanted)

    expected = gradients()
    with run_as_python():
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
