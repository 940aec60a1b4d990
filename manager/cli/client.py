"""The command line's client of the manager's REST interface."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from ..home import CA_FILE, ConfigError, is_loopback

if TYPE_CHECKING:
    import ssl

    import httpx  # imported where it is used, so that commands without a manager do not wait for it


_ADDRESS = "expected the address that `makara server` prints, as http://127.0.0.1:8700 or https://HOST:8700"
_TOKEN = (
    "give another with --token or MAKARA_TOKEN: the administrator's is in admin.token of the manager's home, "
    "and `makara token add NAME` makes one for a user"
)
# Control characters but tab and newline, and those that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# What OpenSSL says of an answer that is no TLS.
_PLAIN_HTTP = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "record layer failure", "wrong version number")


def agreed(question: str) -> bool:
    """Ask on the terminal; only `y` and `yes` agree. Raises `ConfigError` if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to be asked; give -y to go on unasked")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Unreachable(Exception):
    """No manager answers at that address."""


class NoAnswer(Unreachable):
    """The manager was sent a request and has not answered in time; it may carry it out all the same."""


class RequestRefused(Exception):
    """The manager refused the request. `errors` holds (field, message) for faults of fields."""

    def __init__(self, status: int, detail: str, errors: list[tuple[str, str]]) -> None:
        self.status = status
        self.errors = errors
        super().__init__(detail)


class Client:
    """Calls with a user's or the admin's token; a context manager. Raises `Unreachable` and `RequestRefused`.

    `ca_file`: the only trusted authority, as PEM; None: the system's authorities. Raises `ConfigError` if it
    cannot be read, or if the token would be sent by plain HTTP beyond loopback.
    """

    def __init__(self, url: str, token: str, ca_file: Path | None = None) -> None:
        import httpx

        self.url = url.rstrip("/")
        _check_address(self.url)
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60.0,
            verify=_trust(ca_file) if ca_file is not None else True,
            trust_env=False,  # a proxy must not see the token of a manager on this machine
        )

    def get(self, path: str, **query: Any) -> Any:
        return self._answer(self._call("GET", path, params={k: v for k, v in query.items() if v is not None}))

    def get_all(self, path: str, field: str, cursor: str = "since", **query: Any) -> Any:
        """The answer with the `field` of all its pages; `cursor` is the query's name for where one begins."""
        answer = page = self.get(path, **query)
        while page.get("next") is not None:
            page = self.get(path, **{**query, cursor: page["next"]})
            answer[field] += page[field]
        answer.pop("next", None)
        return answer

    def post(self, path: str, **arguments: Any) -> Any:
        """Post; returns None if the answer is empty."""
        response = self._call("POST", path, **arguments)
        return self._answer(response) if response.content else None

    def delete(self, path: str) -> None:
        self._call("DELETE", path)

    @contextmanager
    def stream(self, path: str) -> Generator[Iterator[tuple[str, Any]]]:
        """Server-sent events as (event, data). Ends when the manager ends the stream."""
        import httpx

        timeout = httpx.Timeout(60.0, read=60.0)  # the manager sends a comment every 15 s
        try:
            with self._http.stream("GET", path, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _refusal(response)
                yield _events(response)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url}: {error}{_connection_hint(self.url, error)}") from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, response: httpx.Response) -> Any:
        try:
            return _printable(response.json())
        except ValueError:
            raise Unreachable(f"what answers at {self.url} is no manager; {_ADDRESS}") from None

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        import httpx

        try:
            response = self._http.request(method, path, **arguments)
        except httpx.ReadTimeout as error:
            raise NoAnswer(f"the manager at {self.url} does not answer in time") from error
        except httpx.TransportError as error:
            hint = _connection_hint(self.url, error)
            raise Unreachable(f"no manager answers at {self.url}: {error}{hint}") from error
        if response.status_code >= 400:
            raise _refusal(response)
        return response


def connect(options: argparse.Namespace) -> Client:
    """A client for `--server`, `--token` and `--ca-file`, else $MAKARA_SERVER, $MAKARA_TOKEN and
    $MAKARA_CA_FILE, else the newest manager of `--home` with its authority, whether made by `makara up` or
    started there."""
    home = _home_of(options.home)
    named: str | None = options.server or os.environ.get("MAKARA_SERVER")
    url = named or _url_of(home)
    token = options.token or os.environ.get("MAKARA_TOKEN") or _token_of(home)
    ca_file = options.ca_file or os.environ.get("MAKARA_CA_FILE")
    if ca_file is None and named is None and url.startswith("https:"):
        ca_file = home / CA_FILE
    return Client(url, token, Path(ca_file).expanduser() if ca_file is not None else None)


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"server: {url!r} is no URL: {error}; {_ADDRESS}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server: {url!r} is no URL of a manager; {_ADDRESS}")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"server: {url} is plain HTTP beyond loopback, which would show your token to all on the way; "
            "expected https://..."
        )


def _trust(ca_file: Path) -> ssl.SSLContext:
    import ssl  # here, because it takes a while and few commands need it

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # `SSLError` is one
        raise ConfigError(f"ca_file: {ca_file}: cannot read certificates from it: {error}") from error


def _home_of(home: Path) -> Path:
    """The folder of the home's newest manager; one that `makara up` made has a folder of its own."""

    def began(place: Path) -> float:
        file = place / "server.json"
        return file.stat().st_mtime if file.exists() else 0.0

    return max(home, home / "up", key=began)


def _url_of(home: Path) -> str:
    try:
        return str(json.loads((home / "server.json").read_bytes())["url"])
    except FileNotFoundError:
        raise Unreachable(
            f"no manager has run in {home} yet; start one with `makara server`, or name one with --server"
        ) from None


def _token_of(home: Path) -> str:
    try:
        return (home / "admin.token").read_text().strip()
    except FileNotFoundError:
        raise Unreachable(
            f"no token: give --token or MAKARA_TOKEN ({home}/admin.token does not exist)"
        ) from None


def _connection_hint(url: str, error: Exception) -> str:
    """What to try, where the error tells that the address or its certificate is wrong; else nothing."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "; give the ca.pem of the manager's home with --ca-file or MAKARA_CA_FILE"
    if url.startswith("https:") and any(sign in text for sign in _PLAIN_HTTP):
        return f"; it speaks plain HTTP: --server http:{url.partition(':')[2]}"
    if "complete message body" in text:  # it had begun to answer
        return "; the connection broke off. If the manager has ended, `makara server` starts it again"
    if url.startswith("http:") and type(error).__name__ in ("RemoteProtocolError", "ReadError"):
        return f"; it may speak HTTPS: --server https:{url.partition(':')[2]}"
    return ""


def _printable(value: Any) -> Any:
    """The value, whose text does nothing to a terminal: a job's code may have written it."""
    if isinstance(value, str):
        lines = value.replace("\r\n", "\n").replace("\r", "\n")
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", lines)
    if isinstance(value, list):
        return [_printable(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {_printable(key): _printable(item) for key, item in items}
    return value


def _refusal(response: httpx.Response) -> RequestRefused:
    foreign: dict[str, Any] = {
        "detail": f"{response.url} answers with status {response.status_code}; {_ADDRESS}"
    }
    try:
        said: Any = _printable(response.json())
    except ValueError:
        said = foreign
    body = cast(dict[str, Any], said) if isinstance(said, dict) else foreign
    detail = str(body.get("detail", _printable(response.text[:500])))
    if response.status_code == 401:
        detail = f"{detail}; {_TOKEN}"
    errors = [(str(e["field"]), str(e["message"])) for e in body.get("errors", [])]
    return RequestRefused(response.status_code, detail, errors)


def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    event, data = "message", ""
    for line in response.iter_lines():
        if not line:
            if data:
                yield event, _printable(json.loads(data))
            event, data = "message", ""
        elif line.startswith("event:"):
            event = _printable(line[6:].strip())
        elif line.startswith("data:"):
            data += line[5:].strip()
