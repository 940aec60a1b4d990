"""What is told of morphs of before, also when their plans are not kept any more, and what that costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from makara.manager.core.facts import GenerationFormed
from makara.manager.core.fold import fold
from makara.manager.core.state import Generation, JobState
from makara.manager.service.runtime import FirstStep
from makara.manager.service.views.morphs import morphs
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


# ---- many morphs -------------------------------------------------------------------------------------------


class Counted(tuple[Generation, ...]):
    """A history that counts how many of its generations were looked at."""

    num_looked_at = 0

    def __iter__(self) -> Iterator[Generation]:
        return self._counted(super().__iter__())

    def __reversed__(self) -> Iterator[Generation]:
        return self._counted(iter(self[::-1]))

    def _counted(self, generations: Iterator[Generation]) -> Iterator[Generation]:
        for generation in generations:
            self.num_looked_at += 1
            yield generation


def made_up(num_generations: int, seed: int) -> tuple[Generation, ...]:
    """In the order of their ends: some never form, some end as the next is opened, some before."""
    dice, now, history = random.Random(seed), 0.0, list[Generation]()
    for number in range(1, num_generations + 1):
        state = fold([planned(number, "v0.0"), opened(number)])
        assert state.current is not None
        formed = Formed(generation=number, step=number, rung="peers", phases_s={"connect": 0.5})
        forms = dice.random() < 0.7
        now += dice.choice((0.0, 1.0)) if history else 0.0
        history.append(
            replace(
                state.current,
                opened_at=now,
                formed=formed if forms else None,
                formed_at=now + 2.0 if forms else None,
                ended_at=now + 5.0,
            )
        )
        now += 5.0
    return tuple(history)


def stepped_until(history: tuple[Generation, ...], generation: Generation) -> bool:
    """Whether an earlier one that formed ended as this one was opened."""
    earlier = [other for other in history if other.number < generation.number and other.formed is not None]
    return any(other.ended_at == generation.opened_at for other in earlier)


def test_a_morph_has_a_finish_where_the_plan_of_before_stepped_as_it_was_opened() -> None:
    for seed in range(20):
        history = made_up(60, seed)
        shown = morphs(replace(JobState(), history=history), {})
        expected = [g.formed is not None and stepped_until(history, g) for g in history]
        assert ["finish" in view.phases_s for view in shown] == expected, seed
        assert any(expected), seed
        assert not all(expected), seed


def test_a_view_looks_at_each_generation_of_a_long_history_a_few_times() -> None:
    history = Counted(made_up(3000, 1))
    shown = morphs(replace(JobState(), history=history), {})
    assert len(shown) == 100
    assert history.num_looked_at <= 2 * len(history)
