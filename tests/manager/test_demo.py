"""The demo's market takes and gives VMs as the job answers, and its length follows the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.demo import STEPS, TRAINING_S, example_folder, steps_for
from makara.manager.cli.market import NOTICE_S, SEEN_S, SEEN_STEPS, TRACE_PART, TracePlayer
from makara.manager.cli.user_code import UserCodeRefused, plain_step_s
from makara.manager.spec.job_file import read_job
from makara.simulator import read_trace

NUM_STEPS = 40


class Stage:
    """A job, its VMs and the time, which go on as a test says; the market's calls to the manager."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0
        self.vms: dict[str, str] = {}
        self.generation = 0
        self.first_step_done = False
        self.taking_part: tuple[str, ...] = ()
        self.capacity = 0
        self.gone: set[str] = set()  # VMs that have ended, which the manager does not know yet
        self.harmed: list[tuple[str, str, float]] = []
        self.said: list[str] = []
        trace = read_trace((example_folder() / "availability.csv").read_text())
        self._market = TracePlayer(self, trace, self.said.append, lambda: self.now)
        self._market.open()

    def post(self, path: str, json: dict[str, Any]) -> None:
        """What the market asks of the manager."""
        if path == "/providers/local/capacity":
            self.capacity = json["vms"]
            return
        vm = path.split("/")[2]
        if vm in self.gone:
            raise RequestRefused(404, f"{vm} is not running", [])
        self.harmed.append((vm, json["kind"], json["deadline_s"]))
        del self.vms[vm]

    def look(self) -> None:
        phases = {"first_step": 1.0} if self.first_step_done else {}
        morphs = [{"generation": n, "phases_s": {"first_step": 1.0}} for n in range(1, self.generation)]
        if self.generation:
            morphs.append({"generation": self.generation, "phases_s": phases})
        view = {
            "status": "running" if self.generation else "starting",
            "step": self.step,
            "steps": NUM_STEPS,
            "vms": [{"vm": vm, "status": status} for vm, status in self.vms.items()],
            "morphs": morphs,
            "placement": [{"vm": vm} for vm in self.taking_part],
        }
        self._market.play(view)

    def boot(self, *vms: str) -> None:
        self.vms |= dict.fromkeys(vms, "joined")
        self.look()

    def morph(self, *vms: str) -> None:
        """The job takes a new shape, of all VMs or of these, and steps in it."""
        self.generation, self.first_step_done = self.generation + 1, False
        self.taking_part = vms or tuple(self.vms)
        self.look()
        self.first_step_done = True
        self.look()

    def train(self, steps: int, seconds: float) -> None:
        self.step, self.now = self.step + steps, self.now + seconds
        self.look()

    def show(self) -> None:
        """The job trains in its shape for as long as a person needs to see it."""
        self.train(SEEN_STEPS, SEEN_S)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_each_event_waits_until_the_answer_to_the_one_before_was_seen(stage: Stage) -> None:
    assert stage.capacity == 3
    stage.boot("vm0", "vm1", "vm2")
    stage.morph()
    assert stage.harmed == []
    stage.show()
    assert stage.harmed == [("vm1", "notice", NOTICE_S)]
    assert stage.capacity == 2
    stage.show()  # still in the old shape
    assert stage.capacity == 2
    stage.morph()
    stage.show()
    assert stage.capacity == 5
    stage.boot("vm3", "vm4")
    stage.morph()
    stage.show()  # one of the newcomers is still on its way
    assert len(stage.harmed) == 1
    stage.boot("vm5")
    stage.show()  # it has joined, and does not take part yet
    assert len(stage.harmed) == 1
    stage.morph("vm0", "vm2", "vm3", "vm4")  # the same VMs, formed anew for another reason
    stage.show()
    assert len(stage.harmed) == 1
    stage.morph()
    stage.show()
    assert stage.harmed[1:] == [("vm3", "kill", 0.0)]
    stage.morph()
    stage.show()
    assert stage.harmed[2:] == [("vm4", "kill", 0.0), ("vm0", "kill", 0.0)]
    assert set(stage.vms) == {"vm2", "vm5"}
    assert stage.capacity == 2
    assert stage.said == [
        "the market takes vm1, with 8 s of notice",
        "the market offers 3 more VMs",
        "the market takes vm3 without a word",
        "the market takes vm4 and vm0 without a word",
    ]


@pytest.mark.parametrize(("steps", "seconds"), [(SEEN_STEPS - 1, 100 * SEEN_S), (2 * SEEN_STEPS, SEEN_S / 2)])
def test_a_shape_is_shown_for_some_steps_and_for_some_time(stage: Stage, steps: int, seconds: float) -> None:
    stage.step = -steps  # far from the part of the job at which the event falls in any case
    stage.boot("vm0", "vm1", "vm2")
    stage.morph()
    stage.train(steps, seconds)
    assert stage.harmed == []


def test_nothing_is_taken_while_a_shape_has_made_no_step(stage: Stage) -> None:
    stage.boot("vm0", "vm1", "vm2")
    stage.generation, stage.taking_part = 1, tuple(stage.vms)
    stage.show()
    assert stage.harmed == []


def test_an_answer_that_does_not_come_is_not_waited_for_beyond_the_traces_part_of_the_job(
    stage: Stage,
) -> None:
    stage.boot("vm0", "vm1", "vm2")
    stage.morph()
    for _ in range(NUM_STEPS):  # on a machine with many processors, a job is over before a VM has booted
        stage.train(1, 0.001)
    assert len(stage.said) == 3
    assert stage.harmed == [("vm1", "notice", NOTICE_S), ("vm0", "kill", 0.0)]
    assert stage.capacity == 2
    assert 0.5 < TRACE_PART < 1.0


def test_a_vm_that_the_plan_leaves_out_is_not_the_one_that_goes(stage: Stage) -> None:
    stage.boot("vm0", "vm1", "vm2")
    stage.morph("vm0", "vm2")
    stage.train(NUM_STEPS // 4, SEEN_S)
    assert stage.harmed == [("vm0", "notice", NOTICE_S)]
    stage.morph()
    stage.show()
    assert stage.said[-1] == "the market offers 3 more VMs"


def test_a_vm_that_ended_before_the_market_took_it_is_told_of(stage: Stage) -> None:
    stage.boot("vm0", "vm1", "vm2")
    stage.morph()
    stage.gone.add("vm1")
    stage.show()
    assert stage.harmed == []
    assert stage.said[-1] == "vm1 was gone already"


def test_the_trace_shows_a_notice_growth_a_death_and_two_at_once() -> None:
    trace = read_trace((example_folder() / "availability.csv").read_text())
    counts: dict[int, int] = {}
    for event in trace:
        counts[event.time_ms] = counts.get(event.time_ms, 0) + (1 if event.change.value == "add" else -1)
    assert list(counts.values()) == [3, -1, 3, -1, -2]
    spec, _ = read_job(example_folder() / "job.yaml")
    assert max(sum(list(counts.values())[: n + 1]) for n in range(len(counts))) <= spec.resources.max_nodes
    assert sum(counts.values()) >= spec.resources.min_nodes


# ---- how long it is ----------------------------------------------------------------------------------------


def test_slower_machines_train_fewer_steps_and_near_equals_the_same_number() -> None:
    times = [0.01 * 1.1**n for n in range(100)]
    chosen = [steps_for(seconds) for seconds in times]
    assert chosen == sorted(chosen, reverse=True)
    assert set(chosen) == set(STEPS)
    for seconds, steps in zip(times, chosen, strict=True):
        assert steps * seconds <= TRAINING_S or steps == STEPS[0]
    assert steps_for(0.38) == steps_for(0.42)


def test_a_step_of_the_example_is_timed_as_plain_pytorch() -> None:
    spec, workdir = read_job(example_folder() / "job.yaml")
    assert plain_step_s(workdir, spec, 4) > 0


def test_code_that_does_not_run_is_told_where_it_is_timed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise LookupError('no corpus')\n")
    (tmp_path / "job.yaml").write_text((example_folder() / "job.yaml").read_text())
    spec, workdir = read_job(tmp_path / "job.yaml")
    with pytest.raises(UserCodeRefused, match="no corpus"):
        plain_step_s(workdir, spec, 4)
