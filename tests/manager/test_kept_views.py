"""What a morph kept of a step is told as long as the morph is, also when its plan is not kept any more."""

from __future__ import annotations

from dataclasses import replace

from makara.manager.core.facts import GenerationFormed
from makara.manager.core.fold import fold
from makara.manager.service.runtime import FirstStep
from makara.manager.service.views import morphs
from makara.protocol.messages import Formed, KeptContributions, Recipe
from test_state import opened, planned

RECIPE = Recipe(
    microbatch_size=2,
    num_micro_batches=16,
    cuts=[3],
    graph_hash="graph",
    threads=1,
    device_kind="cpu",
    torch_version="2.13.0",
    bundle_sha256="bundle",
)


def test_what_was_kept_is_told_in_micro_batches_also_of_morphs_of_before() -> None:
    kept = KeptContributions(kept=48, moved=8, missing=16, dropped=4)
    formed = Formed(generation=1, step=3, rung="peers", phases_s={}, in_flight=kept)
    facts = [planned(1, "v0.0"), opened(1), GenerationFormed(at=3.0, number=1, formed=formed, lost_steps=0)]
    state = replace(fold([*facts, planned(2, "v0.0"), opened(2)]), recipe=RECIPE)
    before, now = morphs(state, {1: FirstStep(9.0, 5.5, 2.0)})
    assert before.in_flight is not None
    assert before.in_flight.model_dump() == {
        "kept": 12.0,
        "moved": 2.0,
        "left": 4.0,
        "dropped": 1.0,
        "took_s": 5.5,
        "undisturbed_s": 2.0,
    }
    assert now.in_flight is None
