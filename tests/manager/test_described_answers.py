"""The API answers nothing that its description does not tell, whatever is asked, and never with an error of
its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from managers import Manager, release_all
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_agent import END_WAITS_FOR, FAILS

LIVE = ("/stream", "/events/stream")  # answers without end
LAST = (
    "/stop",
    "/resume",
    "/drain",
    "/fault",
    "/capacity",
)  # what changes the jobs that all others are asked of
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass
class Scene:
    """A manager with a job that runs, one that was stopped, and one that failed."""

    manager: Manager
    jobs: dict[str, str]
    vm: str


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    manager = Manager(tmp_path / "home").start()
    names = {
        "stopped": {END_WAITS_FOR: "/nowhere"},
        "failed": {FAILS: "1"},
        "running": {END_WAITS_FOR: "/nowhere"},
    }
    jobs: dict[str, str] = {}
    for name, envs in names.items():
        answer = manager.submit(tmp_path / name, envs=envs, retry={"max_restarts_on_errors": 0})
        jobs[name] = job = answer.json()["job"]
        if name == "failed":
            with pytest.raises(AssertionError, match="'status': 'failed'"):
                manager.wait(job, lambda _: False)
            continue
        manager.wait(job, lambda view: view["step"] > 1)
        if name == "stopped":
            manager.client.post(f"/jobs/{job}/stop")
            manager.wait(job, lambda view: view["status"] == "stopped")
    yield Scene(manager, jobs, manager.client.get(f"/jobs/{jobs['running']}")["vms"][0]["vm"])
    manager.stop()
    release_all(manager.home)


def operations(manager: Manager) -> list[schemathesis.APIOperation]:
    """Those that change jobs last."""
    schema = schemathesis.openapi.from_url(f"{manager.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return sorted(found, key=lambda operation: operation.path.endswith(LAST))


def ask(scene: Scene, operation: schemathesis.APIOperation, seed: int, examples: int) -> None:
    """Ask it, as valid and as invalid as its description allows: mostly of what exists."""
    known = {"job": [*scene.jobs.values(), "scripted"], "vm": [scene.vm], "part": ["wheel", "torch"]}
    admin = {"Authorization": f"Bearer {scene.manager.token}"}

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
    def play(data: st.DataObject, case: schemathesis.Case) -> None:
        for name in case.path_parameters:
            if name in known and data.draw(st.integers(0, 3)):
                case.path_parameters[name] = data.draw(st.sampled_from(known[name]))
        headers = admin if data.draw(st.integers(0, 9)) else {}
        if operation.path.endswith(LIVE):
            request = case.as_transport_kwargs(base_url=scene.manager.url, headers=headers)
            with requests.request(**request, stream=True, timeout=300) as answer:
                described = operation.definition.raw["responses"]
                assert (
                    answer.headers["Content-Type"].split(";")[0]
                    in described[str(answer.status_code)]["content"]
                )
            return
        response = case.call(base_url=scene.manager.url, headers=headers)
        case.validate_response(response, checks=CHECKS)

    play()


def test_a_manager_with_running_stopped_and_failed_jobs_answers_only_what_it_describes(scene: Scene) -> None:
    for operation in operations(scene.manager):
        ask(scene, operation, seed=1, examples=6)
    assert scene.manager.client.get("/jobs")["jobs"]


@pytest.mark.soak
def test_it_answers_only_what_it_describes_when_asked_at_length(scene: Scene) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    for operation in operations(scene.manager):
        ask(scene, operation, seed=seed, examples=300)
