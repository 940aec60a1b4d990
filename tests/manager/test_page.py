"""The status page: served whole from the package, signed in by cookie, protected against other sites."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import pytest
from makara.manager.core.facts import Fact
from makara.manager.core.facts.old import OBSOLETE
from managers import Manager, release_all
from page_scripts import value_of

PAGE = Path(__file__).parents[2] / "manager" / "page"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("page") / "home").start()
    running.client.post("/providers/local/capacity", json={"vms": 0})
    yield running
    running.stop()
    release_all(running.home)


@pytest.fixture
def browser(manager: Manager) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=manager.url, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere_and_say_so(browser: httpx.Client, path: str) -> None:
    response = browser.get(path)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in response.text
    assert "style=" not in response.text
    links = re.findall(r'(?:src|href)="(/page/[^"]+)"', response.text)
    assert links
    for link in links:
        assert browser.get(link).status_code == 200


def test_every_file_of_the_page_names_no_other_host() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), path


def test_every_element_that_the_script_looks_for_is_in_the_page() -> None:
    html = (PAGE / "index.html").read_text()
    scripts = re.findall(r'src="/page/([\w.]+)"', html)
    wanted = {name for s in scripts for name in re.findall(r'\bat\("([\w-]+)"\)', (PAGE / s).read_text())}
    there = set(re.findall(r'id="([\w-]+)"', html))
    assert {"loss", "placement", "morphs", "vms", "events"} <= wanted
    assert wanted <= there


def test_the_page_has_words_for_every_fact() -> None:
    kinds = {str(kind.model_fields["fact"].default) for kind in get_args(get_args(Fact)[0])}
    says, _, obsolete = (PAGE / "words.js").read_text().partition("const OBSOLETE")
    assert set(re.findall(r"^  (\w+): \(", says, re.MULTILINE)) == kinds
    assert set(re.findall(r"^  (\w+): \(", obsolete, re.MULTILINE)) == set(OBSOLETE)


@pytest.mark.parametrize(
    ("status", "detail", "address", "num_timers"),
    [
        (404, "there is no job 'j'; `makara ps` lists all", "#/", 0),
        (503, "job: not now", "#/jobs/j", 1),
    ],
    ids=["no such job", "not now"],
)
def test_the_page_leaves_a_job_that_does_not_exist_and_tries_others_again(
    status: int, detail: str, address: str, num_timers: int
) -> None:
    code = f"""
        location.hash = "#/jobs/j";
        show("jobs");
        const answer = {{ detail: {json.dumps(detail)} }};
        fetch = async () => ({{ ok: false, status: {status}, json: async () => answer }});
        followJob("j", visit).then(() => [location.hash, timers.length]);
    """
    assert value_of(code, "words.js", "draw.js", "decisions.js", "job.js", "app.js") == [address, num_timers]


def test_the_page_asks_for_no_more_events_than_it_shows() -> None:
    code = """
        const asked = [];
        fetch = async (path) => {
          asked.push(path);
          const events = [{ sequence: 7, at: 1, fact: { fact: "stop_ordered", at: 1 } }];
          return { ok: true, status: 200, json: async () => ({ metrics: [], events }) };
        };
        job = { job: "j", steps: 9 };
        drawSoon = () => {};
        const again = () => catchUp("/base", visit);
        again().then(again).then(() => asked.filter((path) => path.includes("/events")));
    """
    asked = value_of(code, "words.js", "draw.js", "decisions.js", "job.js", "app.js")
    assert asked == ["/base/events?since=0&limit=500", "/base/events?since=7&limit=500"]


def test_only_files_of_the_page_are_served(browser: httpx.Client) -> None:
    assert browser.get("/page/nothing.js").status_code == 404
    assert browser.get("/page/..%2fsite.py").status_code == 404


def test_signing_in_gives_a_session_that_reads(manager: Manager, browser: httpx.Client) -> None:
    assert browser.get("/api/v1/jobs").status_code == 401
    assert browser.post("/login", data={"token": "x.y"}).status_code == 401
    response = browser.post("/login", data={"token": manager.token})
    assert response.status_code == 200
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/api/v1/jobs").status_code == 200
    assert browser.get("/session").json() == {"csrf": response.json()["csrf"]}


def test_a_session_changes_nothing_without_its_csrf_token(
    manager: Manager, browser: httpx.Client, tmp_path: Path
) -> None:
    job = manager.submit(tmp_path / "store").json()["job"]
    csrf = browser.post("/login", data={"token": manager.token}).json()["csrf"]
    assert browser.post(f"/api/v1/jobs/{job}/stop").status_code == 403
    assert browser.post(f"/api/v1/jobs/{job}/stop", headers={"X-CSRF-Token": "0" * 64}).status_code == 403
    assert manager.client.get(f"/jobs/{job}")["status"] == "pending"
    assert browser.post(f"/api/v1/jobs/{job}/stop", headers={"X-CSRF-Token": csrf}).status_code == 202


def test_a_session_is_no_admin_and_ends_with_signing_out(manager: Manager, browser: httpx.Client) -> None:
    csrf = browser.post("/login", data={"token": manager.token}).json()["csrf"]
    headers = {"X-CSRF-Token": csrf}
    assert browser.post("/api/v1/tokens", json={"name": "x"}, headers=headers).status_code == 401
    session = browser.cookies["makara_session"]
    assert browser.post("/logout", headers=headers).status_code == 204
    assert browser.get("/api/v1/jobs", headers={"Cookie": f"makara_session={session}"}).status_code == 401
