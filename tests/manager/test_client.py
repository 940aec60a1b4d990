"""What the command line's client says about a wrong address, certificate or token."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from http_answers import Answer, answering
from makara.manager.authority import Authority, names_of
from makara.manager.cli.client import Client, RequestRefused, Unreachable
from makara.manager.home import ConfigError
from tls_server import tls_server


def told(kind: type[Exception], url: str) -> str:
    with Client(url, "a.b") as client, pytest.raises(kind) as caught:
        client.get("/jobs")
    return str(caught.value)


def test_https_to_a_server_of_plain_http_and_the_reverse_are_told_apart(tmp_path: Path) -> None:
    with answering(lambda _: Answer(200, "{}")) as url:
        said = told(Unreachable, url.replace("http", "https"))
        assert said.endswith(f"it speaks plain HTTP: --server {url}")
    with tls_server(Authority(tmp_path, names_of("127.0.0.1"))) as (host, port):
        assert f"--server https://{host}:{port}" in told(Unreachable, f"http://{host}:{port}")
        assert "--ca-file" in told(Unreachable, f"https://{host}:{port}")


def test_a_manager_that_ends_while_it_answers_is_not_thought_to_speak_https() -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        said = told(Unreachable, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert "If the manager has ended, `makara server` starts it again" in said
    assert "HTTPS" not in said


@pytest.mark.parametrize("url", ["localhost:8700", "127.0.0.1", "ftp://h", "http://", "http://h:x", "//h"])
def test_what_is_no_address_of_a_manager_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match=r"as http://127\.0\.0\.1:8700 or https://HOST:8700"):
        Client(url, "a.b")


@pytest.mark.parametrize(("status", "kind"), [(200, Unreachable), (404, RequestRefused)])
def test_a_server_that_is_no_manager_is_named(status: int, kind: type[Exception]) -> None:
    with answering(lambda _: Answer(status, "<html>")) as url:
        assert "expected the address that `makara server` prints" in told(kind, url)


def test_nothing_that_a_jobs_code_wrote_reaches_the_terminal_as_a_command() -> None:
    """Such as a title, a colour, a click, or a line that overwrites the one before."""
    evil = "\x1b]0;title\x07 \x9b31m \u202etxt.exe \x08\x7f a\tb\r\n10 %\r20 %"
    clean = "\\u001b]0;title\\u0007 \\u009b31m \\u202etxt.exe \\u0008\\u007f a\tb\n10 %\n20 %"
    with (
        answering(
            lambda _: Answer(200, json.dumps({"lines": [evil], "n": 3, "deep": {"reason": evil}}))
        ) as url,
        Client(url, "a.b") as client,
    ):
        assert client.get("/jobs") == {"lines": [clean], "n": 3, "deep": {"reason": clean}}
    with answering(lambda _: Answer(409, json.dumps({"detail": evil}))) as url:
        assert told(RequestRefused, url) == clean
    event = f"event: log\ndata: {json.dumps(evil)}\n\n"
    with (
        answering(lambda _: Answer(200, event)) as url,
        Client(url, "a.b") as client,
        client.stream("/jobs/j/stream") as events,
    ):
        assert list(events) == [("log", clean)]


EVIL, CLEAN = "\x9b31m\u202etxt.exe", "\\u009b31m\\u202etxt.exe"


def test_names_of_fields_are_cleaned_for_the_terminal_as_their_values_are() -> None:
    """The keys of a job's environment, or of its metrics, are its user's."""
    answer = json.dumps({"envs": [{EVIL: {EVIL: EVIL}}]}, ensure_ascii=False)
    with answering(lambda _: Answer(200, answer)) as url, Client(url, "a.b") as client:
        assert client.get("/jobs/j") == {"envs": [{CLEAN: {CLEAN: CLEAN}}]}
    event = f"event: {EVIL}\ndata: {answer}\n\n"
    with (
        answering(lambda _: Answer(200, event)) as url,
        Client(url, "a.b") as client,
        client.stream("/jobs/j/stream") as events,
    ):
        assert list(events) == [(CLEAN, {"envs": [{CLEAN: {CLEAN: CLEAN}}]})]


@pytest.mark.parametrize("status", [401, 404, 409, 500])
@pytest.mark.parametrize("body", [{"said": EVIL}, {"detail": EVIL}, {"detail": {EVIL: [EVIL]}}, [EVIL], EVIL])
def test_a_refusal_of_any_form_is_cleaned_for_the_terminal(status: int, body: object) -> None:
    with answering(lambda _: Answer(status, json.dumps(body, ensure_ascii=False))) as url:
        said = told(RequestRefused, url)
    assert "\x9b" not in said
    assert "\u202e" not in said
    assert CLEAN in said.replace("\\\\", "\\") or f"answers with status {status}" in said


def test_a_wrong_token_is_refused_with_where_another_is() -> None:
    with answering(lambda _: Answer(401, '{"detail": "unknown token"}')) as url:
        assert "unknown token; give another with --token or MAKARA_TOKEN" in told(RequestRefused, url)
