"""A stand-in of Azure: resource manager, token endpoint, price list and consoles, over HTTPS.

Its certificate is of an authority of its own, `ca_file`. What it holds is an `AzureAccount`.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import trustme
from azure_account import GROUP, HOST_GROUP, MACHINES, SUBSCRIPTION, AzureAccount, Refusal
from azure_catalog import IMAGES, REGION, SIZES, image, prices, sku

TOKEN = "a token of the stand-in"
CLIENT_SECRET = "not a secret of anybody"

_GROUPS = rf"(/subscriptions/{SUBSCRIPTION}/resourceGroups/({GROUP}|{HOST_GROUP})/providers/)(.+)"
_COMPUTE = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/"
_IMAGES = (
    rf"{_COMPUTE}locations/{REGION}/publishers/([^/]+)/artifacttypes/vmimage/offers/([^/]+)/skus/([^/]+)/versions"
    r"(?:/([^/]+))?"
)


class AzureStandIn:
    """Serves from its start to `close`."""

    def __init__(self, folder: Path, *, page_size: int = 2, host: str = "127.0.0.1") -> None:
        self.account = AzureAccount()
        self.page_size = page_size
        self.retry_after: int | None = None  # seconds, told with whatever is under way
        self.throttled = False
        self.unreachable = False
        self.forbidden = False
        self.lists_fail = False
        self.expired = False  # the credentials
        self.expires_after: int | None = None  # after so many requests, all in all
        self.loses_answers_of: set[str] = set()  # methods; each once
        self.console = ""
        self.answer: bytes | None = None  # to whatever the resource manager is asked
        self.has_prices = True
        self.prices_answer: bytes | None = None  # instead of prices
        self.more_prices: list[tuple[str, float]] = []  # names of meters, USD an hour; after the others
        self.requests: list[tuple[str, str]] = []  # method and path
        authority = trustme.CA()
        self.ca_file = folder / "azure-ca.pem"
        authority.cert_pem.write_to_path(str(self.ca_file))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        name = "localhost" if host == "127.0.0.1" else host
        authority.issue_cert(name).configure_cert(context)
        self._server = ThreadingHTTPServer((host, 0), _handler(self))
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"https://{name}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(stand_in: AzureStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(_Exchange):
        stand = stand_in

    return Handler


class _Exchange(BaseHTTPRequestHandler):
    """One connection."""

    stand: AzureStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._exchange()

    def do_PUT(self) -> None:
        self._exchange()

    def do_POST(self) -> None:
        self._exchange()

    def do_DELETE(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.stand.requests.append((self.command, parts.path))
        if self.stand.unreachable:
            self.close_connection = True
            return
        try:
            with self.stand.account.lock:
                status, answer, headers = self._answer(parts.path, query, body)
        except Refusal as refusal:
            error = {"code": refusal.code, "message": refusal.message}
            status, answer, headers = refusal.status, {"error": error}, {}
        if self.command in self.stand.loses_answers_of:
            self.stand.loses_answers_of.discard(self.command)
            self.close_connection = True
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode() if answer else b""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        if path == "/prices":
            return 200, self.stand.prices_answer or self._prices(query), {}
        if path.startswith("/console/"):
            return 200, self.stand.console.encode(), {"Content-Type": "text/plain"}
        if not path.startswith("/subscriptions/"):
            return 200, self._sign_in(path, body), {}
        self._admit(query)
        if self.stand.answer is not None:
            return 200, self.stand.answer, {}
        if match := re.fullmatch(_GROUPS, path):
            return self._resource(*match.groups(), query, body)
        if path == f"{_COMPUTE}skus":
            there = SIZES if query.get("$filter") == f"location eq '{REGION}'" else {}
            return 200, self._page(path, query, [sku(name, size) for name, size in there.items()]), {}
        if path == f"{_COMPUTE}locations/{REGION}/usages":
            return 200, self._page(path, query, self._usages()), {}
        if match := re.fullmatch(_IMAGES, path):
            return 200, self._image(*match.groups(), query), {}
        if match := re.fullmatch(rf"{_COMPUTE}locations/{REGION}/operations/([\w-]+)", path):
            return 200, self.stand.account.operation(match[1]), self._pace()
        raise Refusal(404, "InvalidResourceType", f"{path} is not known to the stand-in")

    def _admit(self, query: dict[str, str]) -> None:
        if "api-version" not in query:
            raise Refusal(400, "MissingApiVersionParameter", "The api-version query parameter is required")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "InvalidAuthenticationToken", "The access token is invalid.")
        ends = self.stand.expires_after
        if self.stand.expired or (ends is not None and len(self.stand.requests) > ends):
            raise Refusal(401, "ExpiredAuthenticationToken", "The access token expiry is in the past.")
        if self.stand.throttled:
            raise Refusal(429, "TooManyRequests", "too many requests; try again later")
        if self.stand.forbidden:
            raise Refusal(403, "AuthorizationFailed", "The client does not have authorization")

    def _resource(
        self, before: str, group: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        account = self.stand.account
        provider, kind, *names = path.split("/")
        kind = f"{provider}/{kind}"
        if not names:
            if self.stand.lists_fail:
                raise Refusal(503, "ServiceUnavailable", "the list cannot be made now")
            if "$expand" in query and "virtualMachineScaleSet" not in query.get("$filter", ""):
                message = "$expand is only supported with a filter for a virtual machine scale set"
                raise Refusal(400, "InvalidParameter", message)
            listed = [one for one in account.listed(kind) if account.group_of(str(one["name"])) == group]
            return 200, self._page(f"{before}{path}", query, listed), {}
        key = (kind, names[0])
        if self.command == "PUT":
            account.groups[names[0]] = group
        elif account.group_of(names[0]) != group:
            raise Refusal(404, "ResourceNotFound", f"{names[0]} is not in {group}")
        if names[1:] == ["retrieveBootDiagnosticsData"]:
            account.get(key)
            address = f"{self.stand.address}/console/{names[0]}?sig=a+signature"
            return 200, {"serialConsoleLogBlobUri": address}, {}
        if self.command == "PUT" and kind == MACHINES:
            only_new = self.headers.get("If-None-Match") == "*"
            status, made, operation = account.put_machine(names[0], json.loads(body), only_new=only_new)
            return status, _shown(made, query), self._under_way(operation)
        if self.command == "DELETE":
            operation = account.delete(key)
            return (204, None, {}) if operation is None else (202, None, self._under_way(operation))
        return 200, _shown(account.get(key), query), {}

    def _image(
        self, publisher: str, offer: str, name: str, version: str | None, query: dict[str, str]
    ) -> Any:
        """A version, or the list of them: no pages, and of each its name and place alone."""
        found = IMAGES.get((publisher, offer, name))
        if found is None or (version is not None and version not in found.versions):
            raise Refusal(
                404, "PlatformImageNotFound", f"The platform image {publisher}:{offer} is not available."
            )
        if version is not None:
            return image(found, version)
        names = sorted(found.versions, reverse=query.get("$orderby") == "name desc")
        return [{"name": one, "location": REGION} for one in names[: int(query.get("$top", len(names)))]]

    def _under_way(self, operation: str) -> dict[str, str]:
        address = f"{self.stand.address}{_COMPUTE}locations/{REGION}/operations/{operation}?api-version=1"
        return {"Azure-AsyncOperation": address, **self._pace()}

    def _pace(self) -> dict[str, str]:
        return {} if self.stand.retry_after is None else {"Retry-After": str(self.stand.retry_after)}

    def _usages(self) -> list[dict[str, Any]]:
        return [
            {"name": {"value": name, "localizedValue": f"{name} vCPUs"}, "currentValue": used, "limit": limit}
            for name, (used, limit) in self.stand.account.quotas.items()
        ]

    def _page(self, path: str, query: dict[str, str], items: list[dict[str, Any]]) -> dict[str, Any]:
        first, size = int(query.get("$skiptoken", 0)), self.stand.page_size
        page: dict[str, Any] = {"value": [_shown(item, query) for item in items[first : first + size]]}
        if first + size < len(items):
            following = urlencode({**query, "$skiptoken": first + size})
            page["nextLink"] = f"{self.stand.address}{path}?{following}"
        return page

    def _prices(self, query: dict[str, str]) -> dict[str, Any]:
        wanted = re.search(r"armSkuName eq '([^']*)'", query["$filter"])
        rows = prices(wanted[1]) if wanted is not None and wanted[1] in SIZES else []
        if not self.stand.has_prices:
            rows = []
        if rows:
            rows += [{**rows[0], "skuName": meter, "unitPrice": usd} for meter, usd in self.stand.more_prices]
        first = int(query.get("$skip", 0))
        following = urlencode({**query, "$skip": first + self.stand.page_size})
        more = first + self.stand.page_size < len(rows)
        return {
            "Items": rows[first : first + self.stand.page_size],
            "NextPageLink": f"{self.stand.address}/prices?{following}" if more else None,
        }

    def _sign_in(self, path: str, body: bytes) -> dict[str, Any]:
        tenant = path.split("/")[1]
        token = f"{self.stand.address}/{tenant}/oauth2/v2.0/token"
        if path.endswith("/openid-configuration"):
            issuer = f"{self.stand.address}/{tenant}/v2.0"
            return {"token_endpoint": token, "authorization_endpoint": token, "issuer": issuer}
        if parse_qs(body.decode()).get("client_secret") != [CLIENT_SECRET]:
            raise Refusal(401, "invalid_client", "AADSTS7000215: Invalid client secret provided.")
        return {"token_type": "Bearer", "expires_in": 3599, "access_token": TOKEN}


def _shown(body: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
    """Without what is told only to those who ask for it."""
    if query.get("$expand") == "instanceView" or "properties" not in body:
        return body
    properties = {key: value for key, value in body["properties"].items() if key != "instanceView"}
    return {**body, "properties": properties}
