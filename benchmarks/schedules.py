"""A step of Makara's against every schedule of `torch.distributed.pipelining`, undisturbed, by number of
micro-batches and by how long a message takes."""

from __future__ import annotations

from .ranks import measure
from .report import Row
from .sides import HALVES, ONE_STAGE_A_RANK, TWO_STAGES_A_RANK, Setting
from .wires import Emulation

DEPTH = 4
FORWARD_S = 0.020
MESSAGES = (0.0, 0.25, 1.0)
"""How long a tensor that crosses a cut holds the wire, in forwards of a rank; 0: loopback as it is."""
ROUNDS = {8: 9, 16: 7, 64: 3}
"""By number of micro-batches."""
TITLE = (
    f"a step of Makara's against torch.distributed.pipelining's, P={DEPTH}, F = I = W = "
    f"{1e3 * FORWARD_S:.0f} ms a rank, asleep (ratio: the best of theirs over halves; higher is faster)"
)


def rows() -> list[Row]:
    return [row(num_micro_batches, message) for num_micro_batches in ROUNDS for message in MESSAGES]


def row(num_micro_batches: int, message: float) -> Row:
    setting = Setting(
        depth=DEPTH,
        num_micro_batches=num_micro_batches,
        forward_s=FORWARD_S,
        recompute=False,
        window=4 * DEPTH,
        sides=("makara varuna", HALVES, *ONE_STAGE_A_RANK, *TWO_STAGES_A_RANK),
    )
    wire = None
    if message:
        wire = Emulation(setting.cut_bytes / (message * FORWARD_S), latency_s=0.0, jitter_s=0.0)
    seconds = measure(setting, ROUNDS[num_micro_batches], wire)
    return {
        "N": num_micro_batches,
        "message, forwards": message,
        **{f"{name} s": value for name, value in seconds.items()},
        "against one stage a rank": min(seconds[name] for name in ONE_STAGE_A_RANK) / seconds[HALVES],
        "against two stages a rank": min(seconds[name] for name in TWO_STAGES_A_RANK) / seconds[HALVES],
    }
