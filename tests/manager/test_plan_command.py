"""`makara plan`: plans for so many VMs, ranked, with their price and why the best one wins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from calibrations import uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.manager.cli import main as cli
from makara.manager.cli.plan_text import PricedVms, report
from makara.manager.replay import Prices
from makara.manager.service.planning.deaths import after_a_death
from makara.manager.service.planning.ranking import Ranking, rank
from makara.manager.spec.job_spec import JobSpec
from makara.morphing import Choice, Infeasible, Request, Risk, Slot, choose
from makara.pipeline import Range, grid
from makara.simulator import Link, simulate

JOB = """\
name: gpt
entrypoint: train:build
resources: {provider: local, max_nodes: 6}
training: {global_batch_size: 64, steps: 200}
checkpoint: {uri: ./checkpoints}
"""
LINK = Link(latency_s=0.02, bytes_per_s=100.0)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Its code is not there: with a calibration at hand nobody looks for it."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "model.json").write_text(json.dumps(uniform(6, inter_vm=LINK).to_json()))
    return tmp_path / "job.yaml"


def plan(job: Path, *arguments: object, status: int = 0) -> None:
    folder = job.parent
    given = ["-f", job, "--calibration", folder / "model.json", "--home", folder / "home", *arguments]
    assert cli.main(["plan", *map(str, given)]) == status


def answer(job: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    plan(job, "--json", *arguments)
    return json.loads(capsys.readouterr().out)


def test_plans_are_ranked_with_their_time_workers_memory_and_price(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(job, capsys, "--nodes", 8, "--spot-price", 0.5, "--on-demand-price", 2)
    rows = found["rows"]
    costs = [row["predicted_s"] * (1 + row["lost"]) for row in rows]
    assert costs == sorted(costs)
    assert [row["pipeline_parallel_degree"] for row in rows] != []
    assert sorted(row["pipeline_parallel_degree"] for row in rows) == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["workers_used"] + row["workers_idle"] == 8
        assert row["samples_per_s"] == pytest.approx(64 / row["predicted_s"])
        per_million = 0.5 * 8 * row["predicted_s"] / 3600 / 64 * 1e6
        assert row["spot_per_million_samples"] == pytest.approx(per_million)
        assert row["on_demand_per_million_samples"] == pytest.approx(4 * per_million)
    best = rows[0]
    assert len(found["plan"]["ranges"]) == best["workers_used"]
    assert found["why"].startswith(
        f"{best['pipeline_parallel_degree']}x{best['data_parallel_degree']} wins: "
    )
    assert found["spec"]["name"] == "gpt"


def test_the_table_says_what_it_is_of_and_what_is_assumed(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(job, "--spot-price", 0.5, "--rows", 2)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "gpt: 200 steps of 64 samples, numerics fast"
    heads = shown[2].split()
    assert heads[:4] == ["PxD", "step", "samples/s", "workers"]
    assert heads[-1] == "spot/1M"
    assert shown[3].endswith("<- best")
    assert shown[5] == "(4 slower ones are not shown; --rows)"
    assert "6 VMs cost 3.00 an hour on the spot market, idle ones included." in shown
    assert shown[-2].endswith("model.json; m = 2, N = 32, K = 6")
    assert (
        shown[-1] == "assumed: 6 VMs of 1 worker each, alike and all there; memory of a worker without bound"
    )


def test_devices_of_a_vm_and_their_memory_can_be_given(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(job, capsys, "--nodes", 2, "--devices-per-node", 3, "--device-memory", "300B")
    assert found["cluster"]["memory_bytes"] == 300
    best = found["rows"][0]
    assert best["workers_used"] + best["workers_idle"] == 6
    assert all(row["peak_bytes"] <= 300 for row in found["rows"])
    refused = {row["pipeline_parallel_degree"] for row in found["no_plan"]}
    assert refused >= {1, 2}  # a section holds a hundred bytes
    assert (
        f"With {max(p for p in refused if p < 4)} stages or fewer there is no plan: no split" in found["why"]
    )


def test_a_row_says_whether_backwards_are_halves_and_the_job_file_decides(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for switch, shown, about in (("auto", "yes", True), ("off", "no", False)):
        job.write_text(f"{JOB}parallelism: {{pipeline_parallel_degree: 6, halves: {switch}}}\n")
        plan(job)
        heads, row = (line.split() for line in capsys.readouterr().out.splitlines()[2:4])
        assert row[heads.index("halves") + 2] == shown  # "47.0 s" and "86 %" are two words each
        found = answer(job, capsys, "--timeline", job.parent / "step.svg")
        assert found["rows"][0]["halves"] is found["plan"]["halves"] is about
        assert ("backwards in halves" in (job.parent / "step.svg").read_text()) is about


def test_there_being_no_plan_is_said_with_the_reason(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(job, "--device-memory", "50B", status=2)
    assert "there is no plan for 6 VMs: no split of the model fits" in capsys.readouterr().err


def test_the_timeline_is_of_the_plan_that_won(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(job, capsys, "--timeline", job.parent / "step.json")
    events = json.loads((job.parent / "step.json").read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last / 1e6 == pytest.approx(found["rows"][0]["predicted_s"])
    assert {f"stage 0 on vm{vm}" for vm in range(6)} & {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    plan(job, "--timeline", job.parent / "step.svg")
    assert "timeline: " in capsys.readouterr().out
    assert ElementTree.parse(job.parent / "step.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeline", "step.png"], "step.png: expected a name that ends in .svg or .json"),
        (["--timeline", "nowhere/step.svg"], "nowhere/step.svg: cannot write it: No such file"),
        (["--spot-price", "-1"], "makara: spot price: -1 is not an amount >= 0"),
    ],
)
def test_what_cannot_be_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    plan(job, *arguments, status=2)
    assert any(line.startswith(said) for line in capsys.readouterr().err.splitlines())


def test_a_calibration_of_another_job_is_refused_with_the_line(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "parallelism:\n  num_sections: 9\n")
    plan(job, status=2)
    assert f"{job}:7: parallelism.num_sections: 9, but the calibration (" in capsys.readouterr().err
    job.write_text(JOB.replace("64", "63"))
    plan(job, status=2)
    assert f"{job}:4: training.global_batch_size: 63 is not divisible by the m" in capsys.readouterr().err


def test_fixed_degrees_are_kept_to(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB + "parallelism: {pipeline_parallel_degree: 2, data_parallel_degree: 3}\n")
    found = answer(job, capsys)
    assert [(r["pipeline_parallel_degree"], r["data_parallel_degree"]) for r in found["rows"]] == [(2, 3)]
    assert found["why"] == "2x3 is the only shape that there is a plan for."


def test_sections_that_limit_the_stages_are_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Link(latency_s=0.0, bytes_per_s=1e9)
    calibration = uniform(2, gradient_bytes=(10**11,) * 2, inter_vm=slow, intra_vm=slow)
    (job.parent / "model.json").write_text(json.dumps(calibration.to_json()))
    found = answer(job, capsys)
    assert found["rows"][0]["pipeline_parallel_degree"] == 2
    assert "The model is cut into 2 sections, so P is 2 at most;" in found["why"]
    assert "Training.cuts" in found["why"]
    job.write_text(JOB + "parallelism: {pipeline_parallel_degree: 3}\n")
    plan(job, status=2)
    said = capsys.readouterr().err
    assert "pipeline_parallel_degree: 3, but the model is cut into 2 sections; lower it, or cut" in said


# ---- the ranking -------------------------------------------------------------------------------------------


def requests() -> st.SearchStrategy[Request]:
    def build(num_sections: int, num_workers: int, latency_s: float, memory: int, n: int) -> Request:
        link = Link(latency_s=latency_s, bytes_per_s=40.0)
        return Request(
            calibration=uniform(num_sections, inter_vm=link, intra_vm=link),
            num_sections=num_sections,
            num_micro_batches=n,
            workers=[Slot(f"vm{vm}.0", f"vm{vm}", memory) for vm in range(num_workers)],
            generation=1,
        )

    return st.builds(
        build,
        st.integers(1, 5),
        st.integers(1, 7),
        st.sampled_from([0.0, 0.3, 4.0]),
        st.sampled_from([180, 350, 10_000]),
        st.integers(1, 12),
    )


@given(requests())
@settings(max_examples=30)
def test_the_first_row_is_what_the_planner_chooses_and_no_other_is_faster(request_: Request) -> None:
    ranking, choice = rank(request_, 100), choose(request_)
    if isinstance(ranking, Infeasible):
        assert isinstance(choice, Infeasible)
        return
    assert isinstance(choice, type(ranking.choice))
    assert ranking.choice.plan == choice.plan
    assert ranking.rows[0] == choice.candidate
    times = [row.predicted_s or 0.0 for row in ranking.rows]
    # The narrowest window that costs no more than 1 % is taken, of the winner and of the others.
    assert all(time >= times[0] / 1.011 for time in times)
    assert times[1:] == sorted(times[1:])
    depths = [row.pipeline_parallel_degree for row in ranking.rows] + [depth for depth, _ in ranking.refused]
    assert sorted(depths) == list(range(1, min(len(request_.workers), request_.num_sections) + 1))


@given(requests(), st.integers(1, 3))
@settings(max_examples=60)
def test_fewer_rows_are_the_first_of_all_rows(request_: Request, most_rows: int) -> None:
    few, every = rank(request_, most_rows), rank(request_, 100)
    if isinstance(few, Infeasible) or isinstance(every, Infeasible):
        assert few == every
        return
    assert few.rows == every.rows[:most_rows]
    assert few.refused == every.refused
    assert few.num_slower == len(every.rows[most_rows:])
    assert few.why == every.why


@given(requests())
@settings(max_examples=20)
def test_the_parts_that_the_reason_tells_of_are_those_of_the_step(request_: Request) -> None:
    ranking = rank(request_, 100)
    if not isinstance(ranking, Ranking):
        return
    best, step = ranking.rows[0], simulate(ranking.choice.plan, request_.calibration)
    assert best.busy_s == max(step.busy_s)
    assert best.pipeline_s == step.pipeline_s
    assert ranking.why.startswith(f"{best.pipeline_parallel_degree}x{best.data_parallel_degree} ")
    assert ranking.why.endswith(".")


def test_a_network_that_is_slow_for_sums_is_the_reason_that_is_told() -> None:
    link = Link(latency_s=0.0, bytes_per_s=5.0)
    ranking = rank(
        Request(
            calibration=uniform(2, inter_vm=link),
            num_sections=2,
            num_micro_batches=8,
            workers=[Slot("a.0", "a", 10_000), Slot("b.0", "b", 10_000)],
            generation=1,
        ),
        most_rows=5,
    )
    assert isinstance(ranking, Ranking)
    assert ranking.why.startswith("1x1 wins: ")
    assert "; it uses 1 of the 2 workers, not 2." in ranking.why
    assert "because sums, commit and update after its pipelines take" in ranking.why
    assert "though its busiest worker computes" in ranking.why


# As the manager weighs the first plan of a job with checkpoints every 20 steps.
AT_FIRST = Risk(losses_per_s=1 / 3600, mean_size=2.0, redo_s=5.0, redo_steps=10.5, form_s=5.0)


def tiny(num_micro_batches: int, num_vms: int = 3, risk: Risk | None = AT_FIRST) -> Request:
    s = 0.001
    times = {"forward_s": s, "backward_s": 2 * s, "input_s": s, "weight_s": s, "optimizer_s": s / 2}
    return Request(
        calibration=uniform(9, **{name: (each,) * 9 for name, each in times.items()}),
        num_sections=9,
        num_micro_batches=num_micro_batches,
        workers=[Slot(f"{n}.0", f"{n}", 10_000) for n in range(num_vms)],
        generation=1,
        risk=risk,
    )


def told_of_a_death(question: Request) -> str:
    choice = choose(question)
    assert isinstance(choice, Choice)
    return after_a_death(question, choice.plan, choice.workers, choice.predicted_s)


def test_a_plan_with_copies_says_that_the_others_go_on_after_a_death() -> None:
    assert told_of_a_death(tiny(32)) == (
        "If a VM dies, the others go on from what they hold, after about 5.1 s."
    )


def test_a_plan_without_copies_says_what_a_death_costs_and_what_avoiding_it_costs() -> None:
    told = told_of_a_death(tiny(16))
    assert told.startswith(
        "If a VM dies, the job returns to the newest checkpoint: about 6.6 s on average, with up to 20 steps "
        "done again; "
    )
    fast, safe = choose(tiny(16)), choose(replace(tiny(16), tolerated_failures=1))
    assert isinstance(fast, Choice)
    assert isinstance(safe, Choice)
    speed = 100 * fast.predicted_s / safe.predicted_s
    assert told.endswith(
        f"resilience.tolerated_failures: 1 avoids that at {speed:.0f} % of the speed, as 1x3."
    )


def test_a_plan_with_copies_that_is_faster_than_the_running_one_is_said_to_be_faster() -> None:
    question = tiny(16)
    running = choose(question)
    assert isinstance(running, Choice)
    told = after_a_death(question, running.plan, running.workers, 10 * running.predicted_s)
    assert told.endswith("; resilience.tolerated_failures: 1 avoids that and is faster, as 1x3.")


def test_a_report_without_a_sentence_about_deaths_has_no_empty_line_for_it() -> None:
    question = tiny(16, risk=None)
    ranking = rank(question, most_rows=5)
    assert isinstance(ranking, Ranking)
    cluster = PricedVms(num_vms=3, workers_per_vm=1, memory_bytes=None, prices=Prices())
    spec = JobSpec.model_validate(yaml.safe_load(JOB))
    lines = list(
        report(ranking, spec, question.calibration, cluster, "model.json", told_of_a_death(question))
    )
    assert lines[lines.index(ranking.why) :][1:3] != ["", ""]


def test_where_no_plan_has_copies_that_is_said_of_a_death() -> None:
    assert told_of_a_death(tiny(16, num_vms=1)).endswith(
        "no plan for these VMs and this job file avoids that."
    )


def test_a_job_that_asks_for_copies_is_not_told_to_ask_for_them() -> None:
    asked = replace(tiny(16, num_vms=1), tolerated_failures=1)
    assert told_of_a_death(asked).endswith("; with enough VMs for resilience.tolerated_failures it does not.")


def test_only_the_vms_that_alone_host_a_section_are_said_to_cost_a_checkpoint() -> None:
    """As of a reroute: three VMs host the first stage, one the second."""
    question = tiny(16, num_vms=4)
    plan = grid([Range(0, 4), Range(4, 9)], 2, 16)
    workers = ["0.0", "1.0", "2.0", "3.0"]
    question = replace(question, workers=[*question.workers[:3], Slot("3.0", "1", 10_000)])
    told = after_a_death(question, plan, workers, 1.0)
    assert told.startswith(
        "If the VM dies that alone hosts a section, the job returns to the newest checkpoint: "
    )


def test_checkpoints_by_time_have_no_number_of_steps() -> None:
    by_time = Risk(losses_per_s=1 / 36000, mean_size=2.0, redo_s=305.0, redo_steps=0.5, form_s=5.0)
    assert "about 305 s on average; " in told_of_a_death(tiny(16, risk=by_time))


def test_where_deaths_are_not_weighed_nothing_is_said_of_them() -> None:
    assert told_of_a_death(tiny(16, risk=None)) == ""


def test_a_plan_that_was_taken_for_its_copies_says_so() -> None:
    ranking = rank(tiny(32), most_rows=5)
    assert isinstance(ranking, Ranking)
    assert [row.shape for row in ranking.rows[:2]] == ["1x3", "3x1"]
    assert ranking.why.startswith("1x3 wins: a step takes ")
    assert " more than with 3x1 (" in ranking.why
    assert "a section lives on one VM alone" in ranking.why


def test_plans_are_weighed_with_the_deaths_that_a_manager_expects_at_first(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(job, capsys, "--nodes", 4)
    assert found["after_a_death"].startswith("If a VM dies, ")
    assert any(row["lost"] > 0 for row in found["rows"])
    plan(job, "--nodes", 4)
    assert found["after_a_death"] in capsys.readouterr().out.splitlines()


def test_what_deaths_cost_is_a_reason_that_is_told() -> None:
    """Of four workers a pipeline of all is fastest, and has each section once."""
    ranking = rank(
        Request(
            calibration=uniform(
                4, gradient_bytes=(1000,) * 4, inter_vm=Link(latency_s=0.0, bytes_per_s=50.0)
            ),
            num_sections=4,
            num_micro_batches=8,
            workers=[Slot(f"{vm}.0", vm, 10_000) for vm in "abcd"],
            generation=1,
            risk=Risk(losses_per_s=0.05, mean_size=1.0, redo_s=300.0, redo_steps=5.5),
        ),
        most_rows=5,
    )
    assert isinstance(ranking, Ranking)
    deep = next(row for row in ranking.rows if row.pipeline_parallel_degree == 4)
    best = ranking.rows[0]
    assert (best.predicted_s or 0.0) > (deep.predicted_s or 0.0)
    told = f"{100 * deep.lost:.1f} % more."
    assert ranking.why.endswith(f"but deaths that lose state would cost it {told}")
    assert "4x1 would take" in ranking.why
    costs = [(row.predicted_s or 0.0) * (1 + row.lost) for row in ranking.rows]
    assert costs == sorted(costs)
