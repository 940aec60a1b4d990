"""Jobs have owners: for a user, another's job does not exist, by whatever route it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import JOB, published
from core_script import RECIPE
from in_service import Desk, FakeProvider, desk
from makara.checkpoint import open_store
from makara.manager.api.app import create_app
from makara.manager.cli.machines.join import token_warnings
from makara.manager.config import ServerConfig
from makara.manager.home import ConfigError
from makara.manager.places import check_places
from makara.manager.providers.opening import open_providers
from makara.manager.providers.pool import MachinePool
from makara.manager.providers.settings import CloudSettings
from makara.manager.providers.static import StaticProvider
from makara.manager.service.tokens import Scope
from makara.protocol.machines import MachineReport
from managers import BUNDLE, job_spec
from starlette.routing import Route, WebSocketRoute

HERS = "alpha-1"  # ada's job, whose name no answer to bob may tell
BODIES: dict[str, Any] = {
    "/api/v1/jobs/{job}/resume": {},
    "/api/v1/jobs/{job}/export": {},
}

# What each route does about owners. A new route needs a rule here.
ONE_JOB = "404 for another's job, in the same words as for none"
FILTERED = "of all jobs only the user's own"
SUBMITS = "for the user; other tests below"
ADMIN = "403 for users"
VM = "for a VM's or machine's own token"
NO_JOBS = "tells nothing of jobs"
RULES = {
    ("POST", "/api/v1/jobs"): SUBMITS,
    ("POST", "/api/v1/jobs/check"): SUBMITS,
    ("GET", "/api/v1/jobs"): FILTERED,
    ("GET", "/api/v1/jobs/{job}"): ONE_JOB,
    ("POST", "/api/v1/jobs/{job}/stop"): ONE_JOB,
    ("POST", "/api/v1/jobs/{job}/resume"): ONE_JOB,
    ("POST", "/api/v1/jobs/{job}/export"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/calibration"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/checkpoints"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/vms"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/logs"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/events"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/metrics"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/events/stream"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/stream"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/plan"): ONE_JOB,
    ("GET", "/api/v1/jobs/{job}/decisions"): ONE_JOB,
    ("POST", "/api/v1/vms/{vm}/drain"): ONE_JOB,
    ("POST", "/api/v1/vms/{vm}/fault"): ADMIN,
    ("POST", "/api/v1/providers/local/capacity"): ADMIN,
    ("POST", "/api/v1/tokens"): ADMIN,
    ("GET", "/api/v1/tokens"): ADMIN,
    ("DELETE", "/api/v1/tokens/{token_id}"): ADMIN,
    ("DELETE", "/api/v1/machines/{machine}"): ADMIN,
    ("GET", "/api/v1/machines"): FILTERED,
    ("GET", "/metrics"): FILTERED,
    ("SOCKET", "/api/v1/agents/{vm}"): VM,
    ("SOCKET", "/api/v1/machines/connection"): VM,
    ("GET", "/api/v1/jobs/{job}/bundle"): VM,
    ("GET", "/api/v1/jobs/{job}/secrets"): VM,
    ("GET", "/api/v1/jobs/{job}/boot/{part}"): VM,
    ("GET", "/api/v1/machines/challenge"): NO_JOBS,
    ("GET", "/"): NO_JOBS,
    ("GET", "/docs"): NO_JOBS,
    ("GET", "/openapi.json"): NO_JOBS,
    ("GET", "/page/{name}"): NO_JOBS,
    ("POST", "/login"): NO_JOBS,
    ("GET", "/session"): NO_JOBS,
    ("POST", "/logout"): NO_JOBS,
    ("GET", "/healthz"): NO_JOBS,
}
Asks = Callable[..., Awaitable[httpx.Response]]


@dataclass
class Office:
    """A manager with a job of ada's that has a machine of the pool; `ask(who, method, path)`."""

    here: Desk
    tokens: dict[str, str]
    client: httpx.AsyncClient

    async def ask(self, who: str, method: str, path: str, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.tokens[who]}", **request.pop("headers", {})}
        return await self.client.request(method, path, headers=headers, **request)

    async def submit(self, who: str, store: Path, key: str = "", **changes: Any) -> httpx.Response:
        value = job_spec(store, **{"resources": {"provider": "static"}, **changes})
        files = {"bundle": ("bundle.tar.gz", BUNDLE, "application/gzip")}
        headers = {"Idempotency-Key": key} if key else {}
        data = {"spec": json.dumps(value), "secrets": "{}"}
        return await self.ask(who, "POST", "/api/v1/jobs", data=data, files=files, headers=headers)


@asynccontextmanager
async def office(folder: Path, **settings: Any) -> AsyncIterator[Office]:
    pool = MachinePool(folder / "machines.sqlite3")
    pool.admit("m1", b"key")
    send = [].append
    pool.connect("m1", send)
    pool.take("m1", MachineReport(obeyed=0, name="tower"), send)
    (folder / "stores").mkdir()
    allowed = ((folder / "stores").as_uri(),)
    async with desk(
        folder / "home", providers={"static": StaticProvider(pool)}, allow_stores=allowed, **settings
    ) as here:
        tokens = {who: here.service.tokens.issue(Scope.USER, name=who) for who in ("ada", "bob")}
        tokens["admin"] = here.service.tokens.ensure_admin(folder / "admin.token")
        transport = httpx.ASGITransport(create_app(here.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await here.submit(HERS, owner="ada", resources={"provider": "static"})
            async with asyncio.timeout(60):
                while not pool.machines()[0].leased:
                    await here.tick(1.0)
                    await asyncio.sleep(0.01)
            yield Office(here, tokens, client)


def played(folder: Path, play: Callable[[Office], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with office(folder, **settings) as it:
            await play(it)

    asyncio.run(run())


def routes_of(routes: Sequence[Any]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for route in routes:
        if isinstance(route, WebSocketRoute):
            found.add(("SOCKET", route.path))
        elif isinstance(route, Route):
            found |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
        else:
            found |= routes_of(route.original_router.routes)  # FastAPI keeps included routers whole
    return found


def test_each_route_has_a_rule(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        assert routes_of(create_app(it.here.service).routes) == set(RULES)

    played(tmp_path, play)


def test_another_users_job_is_404_in_the_words_of_a_job_that_does_not_exist(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        vm = it.here.vms(HERS)[0]
        for (method, path), rule in RULES.items():
            if rule is not ONE_JOB:
                continue
            told: list[str] = []
            for job, machine in ((HERS, vm), ("alpha-2", "alpha-2-vm0")):
                asked = path.format(job=job, vm=machine)
                answer = await it.ask("bob", method, asked, json=BODIES.get(path))
                assert answer.status_code == 404, (method, path, answer.text)
                told.append(answer.text.replace(machine, "VM").replace(job, "JOB"))
            assert told[0] == told[1], (method, path)
        state = it.here.service.jobs[HERS].state
        assert state.stop_ordered_at is None
        assert not any(fact.fact.fact == "vm_drained" for fact in it.here.service.journal.facts(HERS))

    played(tmp_path, play)


def test_the_owner_and_an_administrator_find_the_job_by_each_route_that_reads_one(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        for (method, path), rule in RULES.items():
            if rule is not ONE_JOB or method != "GET" or path.endswith("stream"):
                continue
            for who in ("ada", "admin"):
                answer = await it.ask(who, method, path.format(job=HERS))
                assert "there is no job" not in answer.text, (who, path)
                assert answer.status_code in (200, 404), (who, path)  # 404: it runs no plan yet
        view = (await it.ask("admin", "GET", f"/api/v1/jobs/{HERS}")).json()
        assert view["owner"] == "ada"

    played(tmp_path, play)


def test_lists_tell_a_user_of_the_own_jobs_alone(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        for (method, path), rule in RULES.items():
            if rule is not FILTERED:
                continue
            for who, sees in (("bob", False), ("ada", True), ("admin", True)):
                answer = await it.ask(who, method, path)
                assert answer.status_code == 200, (who, path)
                assert (HERS in answer.text) == sees, (who, path, answer.text)
        machine = (await it.ask("bob", "GET", "/api/v1/machines")).json()["machines"][0]
        assert (machine["leased"], machine["vm"]) == (True, None)
        counted = (await it.ask("bob", "GET", "/metrics")).text
        assert "makara_jobs{" not in counted  # not how many others have, either

    played(tmp_path, play)


def test_what_is_an_administrators_is_403_for_users_and_what_is_a_vms_401(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        vm = it.here.vms(HERS)[0]
        for (method, path), rule in RULES.items():
            asked = path.format(job=HERS, vm=vm, token_id="x", machine="m1", part="wheel", name="x")
            if rule is ADMIN:
                assert (await it.ask("ada", method, asked, json={})).status_code == 403, path
            elif rule is VM and method != "SOCKET":
                for who in ("ada", "bob"):
                    assert (await it.ask(who, method, asked)).status_code == 401, path

    played(tmp_path, play)


def test_names_and_keys_are_the_users_own(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        store = tmp_path / "stores" / "shared"
        jobs = {}
        for who in ("ada", "bob"):
            answer = await it.submit(who, store, key="the same")
            assert answer.status_code == 201, answer.text
            jobs[who] = answer.json()["job"]
            assert (await it.submit(who, store, key="the same")).json() == {"job": jobs[who], "new": False}
        assert jobs["ada"] != jobs["bob"]
        for who in ("ada", "bob"):
            assert (await it.ask(who, "GET", "/api/v1/jobs/scripted")).json()["job"] == jobs[who]
        by_name = await it.ask("admin", "GET", "/api/v1/jobs/scripted")
        assert by_name.status_code == 404  # an administrator says which, by its id
        assert jobs["bob"] in by_name.text
        assert (await it.ask("admin", "GET", f"/api/v1/jobs/{jobs['ada']}")).json()["owner"] == "ada"

    played(tmp_path, play)


def test_an_owner_outlives_the_token_and_a_session_is_its_tokens(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        tokens = it.here.service.tokens
        tokens.revoke(it.tokens["ada"].split(".")[0])
        assert (await it.ask("ada", "GET", f"/api/v1/jobs/{HERS}")).status_code == 401
        it.tokens["ada again"] = tokens.issue(Scope.USER, name="ada")
        assert (await it.ask("ada again", "GET", f"/api/v1/jobs/{HERS}")).status_code == 200
        for who, status in (("ada again", 200), ("bob", 404), ("admin", 200)):
            it.client.cookies.clear()
            assert (await it.client.post("/login", data={"token": it.tokens[who]})).status_code == 200
            assert (await it.client.get(f"/api/v1/jobs/{HERS}")).status_code == status, who

    played(tmp_path, play)


def test_a_user_is_not_named_like_an_administrator_or_with_invisible_characters(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        for name in ("admin", " ada", "ada\n", "a\x1b[2Jb", ""):
            answer = await it.ask("admin", "POST", "/api/v1/tokens", json={"name": name})
            assert list(fields(answer)) == ["name"], name

    played(tmp_path, play)


def test_a_job_of_an_older_version_is_the_administrators(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        await it.here.submit("old-1")  # its fact names no owner
        for who, status in (("ada", 404), ("admin", 200)):
            assert (await it.ask(who, "GET", "/api/v1/jobs/old-1")).status_code == status

    played(tmp_path, play)


# ---- what a user's job may not use -------------------------------------------------------------------------


def test_a_user_starts_from_no_checkpoint_of_anothers_job_by_name_id_or_uri(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        place = tmp_path / "stores" / "shared"
        recipe = RECIPE.model_dump(mode="json")
        await it.here.submit(JOB, owner="ada", resources={"provider": "static"})
        published(open_store(place.as_uri()), 3, 1, recipe)
        for known, unknown in (
            (JOB, "none"),
            (f"{place.as_uri()}/{JOB}", f"{place.as_uri()}/none"),
        ):
            told = []
            for start in (known, unknown):
                answer = await it.submit("bob", place, checkpoint={"start_from": start})
                assert answer.status_code == 422, answer.text
                told.append(answer.text.replace(JOB, "JOB").replace("none", "JOB"))
            assert told[0] == told[1]
        hers = await it.submit("ada", place, checkpoint={"start_from": f"{place.as_uri()}/{JOB}"})
        assert "has no checkpoint" not in hers.text

    played(tmp_path, play)


def fields(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {error["field"]: error["message"] for error in answer.json()["errors"]}


def test_local_vms_are_for_administrators_jobs_because_their_code_runs_as_the_managers_user(
    tmp_path: Path,
) -> None:
    async def play(it: Office) -> None:
        store = tmp_path / "stores" / "one"
        local = {"provider": "local"}
        told = fields(await it.submit("bob", store, resources=local))["resources.provider"]
        assert "administrators" in told
        assert "expected static" in told
        assert (await it.submit("admin", store, resources=local)).status_code == 201

    played(tmp_path, play)


def test_a_users_job_uses_no_folder_of_this_machine_that_was_not_named(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        (tmp_path / "stores" / "link").symlink_to(tmp_path / "home", target_is_directory=True)
        for folder in ("home", "home/vms", "elsewhere", ".", "stores/link"):
            answer = await it.submit("bob", tmp_path / folder)
            assert "checkpoint.uri" in fields(answer), folder
            start = {"start_from": f"{(tmp_path / folder).as_uri()}/job-1"}
            answer = await it.submit("bob", tmp_path / "stores" / "own", checkpoint=start)
            assert "checkpoint.start_from" in fields(answer), folder

    played(tmp_path, play)


def test_a_named_folder_with_the_managers_home_is_for_administrators_jobs_alone(tmp_path: Path) -> None:
    ours = (tmp_path / "stores").as_uri()
    config = ServerConfig(home=tmp_path / "home", allow_stores=("file:///", tmp_path.as_uri(), ours, "s3://"))
    assert config.stores_for("ada") == (ours, "s3://")
    assert config.stores_for(None) == config.stores
    assert ServerConfig(home=tmp_path).stores_for("ada") == ("s3://", "az://")


def test_a_manager_that_other_machines_reach_has_local_vms_only_if_its_administrator_asks(
    tmp_path: Path,
) -> None:
    for settings, has_local in (
        ({}, True),
        ({"allow_remote": True}, False),
        ({"allow_remote": True, "local_vms": True}, True),
        ({"local_vms": False}, False),
    ):
        config = ServerConfig(home=tmp_path, **settings)
        providers = open_providers(config, "manager", lambda attempt, boot: b"")
        assert ("local" in providers) == has_local, settings
        for provider in providers.values():
            provider.close()


def test_a_job_for_local_vms_that_the_manager_has_not_names_the_field_and_the_option(tmp_path: Path) -> None:
    async def play(it: Office) -> None:
        del it.here.service.providers["local"]
        for who in ("admin", "bob"):
            answer = await it.submit(who, tmp_path / "stores" / "one", resources={"provider": "local"})
            told = fields(answer)["resources.provider"]
            assert "this manager has no provider local; expected static" in told
            assert "makara server --local" in told

    played(tmp_path, play)


def test_only_an_administrators_job_names_an_image_where_root_may_delete_vms(tmp_path: Path) -> None:
    wish = {"provider": "azure", "instance_type": "Standard_D2s_v5", "image": "ours", "max_nodes": 1}

    async def play(it: Office) -> None:
        it.here.service.providers["azure"] = FakeProvider()
        told = {}
        for who in ("bob", "admin"):
            told[who] = fields(await it.submit(who, tmp_path / "stores" / "one", resources=wish))
        assert "administrators" in told["bob"]["resources.image"]
        assert "resources.image" not in told["admin"]  # it lacks an address that clouds can reach

    played(tmp_path, play)


def test_local_vms_that_may_exist_are_named_by_a_manager_without_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            async with asyncio.timeout(60):
                while not here.vms("j"):
                    await here.tick(1.0)
                    await asyncio.sleep(0.01)
            states = [here.service.jobs["j"].state]
            check_places(CloudSettings(), states, local=True)
            with pytest.raises(ConfigError, match=r"local_vms: .*j-vm0.*--local"):
                check_places(CloudSettings(), states, local=False)

    asyncio.run(run())


def test_a_machine_whose_user_holds_an_admin_token_is_warned_of(tmp_path: Path) -> None:
    assert token_warnings(tmp_path) == []
    for token in (tmp_path / "admin.token", tmp_path / "up" / "admin.token"):
        token.parent.mkdir(exist_ok=True)
        token.write_text("x.y")
        assert str(token) in token_warnings(tmp_path)[-1]
