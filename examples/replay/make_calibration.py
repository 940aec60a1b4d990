"""Writes calibration.json: Varuna's GPT-2 2.5B on single-V100 VMs, by arithmetic; none was at hand.

54 blocks of hidden size 1920, 1024 tokens a sample, micro-batches of m=4 (Varuna §3, §7). A section is a
block; the first has the embeddings as well, the last the head, which is tied to them. What is assumed stands
below in capitals; one number is fitted, `FLOPS`, so that P=6, D=6 takes what Varuna's Table 3 measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from makara.simulator import Calibration, Link

TOKENS, VOCABULARY, M = 1024, 50257, 4
FLOPS = 41e12  # a V100's in fp16, sustained; its peak is 125e12
MEMORY_BYTES_PER_S = 900e9  # V100
LINK = Link(latency_s=5e-4, bytes_per_s=1.25e9)  # 10 Gbit/s between VMs (§7); one GPU each, so none within
STATE_PER_PARAMETER = 16  # weights, two moments and gradient sums, 4 bytes each
TRAFFIC_PER_PARAMETER = 28  # what the optimizer reads and writes


def calibration(blocks: int = 54, hidden: int = 1920, heads: int = 20, link: Link = LINK) -> Calibration:
    """Of a GPT-2 of so many blocks; by default the 2.5-billion-parameter one."""
    last = blocks - 1
    # Matrix products (2 operations a parameter and token) and attention's two products of 1024 x 1024.
    block_flops = M * (24 * TOKENS * hidden**2 + 4 * TOKENS**2 * hidden)
    head_flops = M * 2 * TOKENS * hidden * VOCABULARY
    parameters = [12 * hidden**2 + 13 * hidden] * blocks
    forward = [block_flops / FLOPS] * blocks
    # Kept for a backward, in fp16: 34 bytes an element, 5 bytes a score (Korthikanti et al. 2022).
    activations = [M * (34 * TOKENS * hidden + 5 * heads * TOKENS**2)] * blocks
    parameters[0] += VOCABULARY * hidden + TOKENS * hidden
    parameters[last] += VOCABULARY * hidden
    forward[last] += head_flops / FLOPS
    activations[last] += M * TOKENS * VOCABULARY * 4  # logits
    cut = M * TOKENS * hidden * 2
    return Calibration(
        forward_s=tuple(forward),
        backward_s=tuple(2 * seconds for seconds in forward),
        optimizer_s=tuple(TRAFFIC_PER_PARAMETER * n / MEMORY_BYTES_PER_S for n in parameters),
        parameter_bytes=tuple(4 * n for n in parameters),
        gradient_bytes=tuple(4 * n for n in parameters),
        state_bytes=tuple(STATE_PER_PARAMETER * n for n in parameters),
        activation_bytes=tuple(activations),
        cut_bytes=(cut,) * last,
        grad_cut_bytes=(cut,) * last,
        inter_vm=link,
        intra_vm=link,
        device_kind="cuda",
        microbatch_size=M,
        versions={"source": "arithmetic: examples/replay/make_calibration.py"},
    )


if __name__ == "__main__":
    target = Path(__file__).parent / "calibration.json"
    target.write_text(json.dumps(calibration().to_json(), indent=1) + "\n")
