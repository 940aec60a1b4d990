"""Writes calibration.json: Varuna's GPT-2 2.5B on single-V100 VMs, by arithmetic; none was at hand.

54 blocks of hidden size 1920, 1024 tokens a sample, micro-batches of m=4 (Varuna §3, §7). A section is a
block; the first has the embeddings as well, the last the head, which is tied to them. What is assumed stands
below in capitals; one number is fitted, `FLOPS`, so that P=6, D=6 takes what Varuna's Table 3 measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from makara.simulator import Calibration, Link

BLOCKS, HIDDEN, HEADS, TOKENS, VOCABULARY, M = 54, 1920, 20, 1024, 50257, 4
FLOPS = 41e12  # a V100's in fp16, sustained; its peak is 125e12
MEMORY_BYTES_PER_S = 900e9  # V100
LINK = Link(latency_s=5e-4, bytes_per_s=1.25e9)  # 10 Gbit/s between VMs (§7); one GPU each, so none within

BLOCK_PARAMETERS = 12 * HIDDEN**2 + 13 * HIDDEN
EMBEDDING_PARAMETERS = VOCABULARY * HIDDEN
# Matrix products (2 operations a parameter and token) and attention's two products of 1024 x 1024.
BLOCK_FLOPS = M * (24 * TOKENS * HIDDEN**2 + 4 * TOKENS**2 * HIDDEN)
HEAD_FLOPS = M * 2 * TOKENS * HIDDEN * VOCABULARY
# Kept for a backward, in fp16: 34 bytes an element, 5 bytes a score of attention (Korthikanti et al. 2022).
BLOCK_ACTIVATIONS = M * (34 * TOKENS * HIDDEN + 5 * HEADS * TOKENS**2)
LOGITS = M * TOKENS * VOCABULARY * 4
CUT = M * TOKENS * HIDDEN * 2
STATE_PER_PARAMETER = 16  # weights, two moments and gradient sums, 4 bytes each
TRAFFIC_PER_PARAMETER = 28  # what the optimizer reads and writes


def calibration() -> Calibration:
    last = BLOCKS - 1
    parameters = [BLOCK_PARAMETERS] * BLOCKS
    forward = [BLOCK_FLOPS / FLOPS] * BLOCKS
    activations = [BLOCK_ACTIVATIONS] * BLOCKS
    parameters[0] += EMBEDDING_PARAMETERS + TOKENS * HIDDEN
    parameters[last] += EMBEDDING_PARAMETERS
    forward[last] += HEAD_FLOPS / FLOPS
    activations[last] += LOGITS
    return Calibration(
        forward_s=tuple(forward),
        backward_s=tuple(2 * seconds for seconds in forward),
        optimizer_s=tuple(TRAFFIC_PER_PARAMETER * n / MEMORY_BYTES_PER_S for n in parameters),
        parameter_bytes=tuple(4 * n for n in parameters),
        gradient_bytes=tuple(4 * n for n in parameters),
        state_bytes=tuple(STATE_PER_PARAMETER * n for n in parameters),
        activation_bytes=tuple(activations),
        cut_bytes=(CUT,) * last,
        grad_cut_bytes=(CUT,) * last,
        inter_vm=LINK,
        intra_vm=LINK,
        device_kind="cuda",
        microbatch_size=M,
        versions={"source": "arithmetic: examples/replay/make_calibration.py"},
    )


if __name__ == "__main__":
    target = Path(__file__).parent / "calibration.json"
    target.write_text(json.dumps(calibration().to_json(), indent=1) + "\n")
