"""Stand-ins for the metadata services of AWS and Azure: real HTTP on loopback, told by a test what to say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_answers import Answer, Request, answering

_JSON = "application/json"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ROLES = "/latest/meta-data/iam/security-credentials/"


@dataclass
class AwsMetadata:
    """As IMDSv2: nothing without a session token, 404 where there is nothing to say."""

    url: str = ""
    action: dict[str, str] | None = None
    rebalance: dict[str, str] | None = None
    role: dict[str, str] | None = None  # the credentials of its role, as EC2 gives them
    broken: Answer | None = None  # to everything
    broken_rebalance: Answer | None = None
    tokens: list[str] = field(default_factory=list)  # given out; the last one is good
    paths: list[str] = field(default_factory=list)

    def interrupt(self, action: str = "terminate", in_s: float = 120.0) -> None:
        at = datetime.fromtimestamp(time.time() + in_s, UTC)
        self.action = {"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def expire(self) -> None:
        self.tokens.append("nobody has it")

    def answer(self, request: Request) -> Answer:
        self.paths.append(request.path)
        if self.broken is not None:
            return self.broken
        headers = {name.lower(): value for name, value in request.headers.items()}
        if request.path == "/latest/api/token":
            if request.method != "PUT" or "x-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return Answer(400)
            self.tokens.append(f"token-{len(self.tokens)}")
            return Answer(200, self.tokens[-1], "text/plain")
        if not self.tokens or headers.get("x-aws-ec2-metadata-token") != self.tokens[-1]:
            return Answer(401)
        if request.path == _ROLES and self.role is not None:
            return Answer(200, "worker", "text/plain")
        if request.path == _REBALANCE and self.broken_rebalance is not None:
            return self.broken_rebalance
        said = {
            f"{_ROLES}worker": self.role,
            "/latest/meta-data/spot/instance-action": self.action,
            _REBALANCE: self.rebalance,
        }.get(request.path)
        return Answer(404) if said is None else Answer(200, json.dumps(said), _JSON)


@dataclass
class AzureMetadata:
    """As Azure's service: the header and versions are required, the name of the VM is what events give."""

    name: str = "vm-1"
    resource_id: str = ""
    url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)  # events that were acknowledged
    num_asked: int = 0  # for events
    broken: Answer | None = None
    management_url: str = ""  # of whom deletions are asked; empty: `url`
    client_id: str = ""  # by which its identity must be asked for
    identity_id: str = ""  # or by this one
    token: str = "secret-of-the-identity"
    store_identity_id: str = ""  # of the one that may use the store
    store_token: str = "secret-of-the-stores-identity"
    deletions: list[Answer] = field(default_factory=list)  # answers to requests for it that are no yes
    deleted: list[str] = field(default_factory=list)  # VMs that a request with the right token deletes

    def announce(
        self, kind: str, in_s: float | None = 60.0, resources: tuple[str, ...] = (), event: str = "e-1"
    ) -> None:
        """`in_s` None: it has begun."""
        at = datetime.fromtimestamp(time.time() + (in_s or 0.0), UTC)
        self.events.append(
            {
                "EventId": event,
                "EventStatus": "Started" if in_s is None else "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(resources or (self.name,)),
                "NotBefore": "" if in_s is None else format_datetime(at, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    def answer(self, request: Request) -> Answer:
        if self.broken is not None:
            return self.broken
        split = urlsplit(request.path)
        if request.method == "DELETE":
            return self._delete(split.path, request)
        if request.headers.get("Metadata") != "true" or not parse_qs(split.query).get("api-version"):
            return Answer(400)
        if split.path == "/metadata/instance/compute":
            identity = self.resource_id or f"/subscriptions/s/resourceGroups/g/{self.name}"
            about = {"name": self.name, "resourceId": identity}
            return Answer(200, json.dumps(about), _JSON)
        if split.path == "/metadata/identity/oauth2/token":
            return self._identify(parse_qs(split.query))
        if split.path != "/metadata/scheduledevents":
            return Answer(404)
        if request.method == "POST":
            self.started += [each["EventId"] for each in json.loads(request.body)["StartRequests"]]
            return Answer(200)
        self.num_asked += 1
        document = {"DocumentIncarnation": len(self.events), "Events": self.events}
        return Answer(200, json.dumps(document), _JSON)

    def _identify(self, query: dict[str, list[str]]) -> Answer:
        """Of a VM with one identity, its id need not be known here."""
        resource = query.get("resource", [""])[0]
        named = query.get("client_id", [""])[0], query.get("msi_res_id", [""])[0]
        management = f"{self.management_url or self.url}/"
        if resource == management and self._is(named, self.client_id, self.identity_id):
            token = self.token
        elif resource == "https://storage.azure.com" and self._is(named, "", self.store_identity_id):
            token = self.store_token
        else:
            return Answer(400, json.dumps({"error_description": "Identity not found"}), _JSON)
        times = {"expires_in": "3600", "expires_on": f"{time.time() + 3600:.0f}"}
        answer = {"access_token": token, "token_type": "Bearer", "resource": resource, **times}
        return Answer(200, json.dumps(answer), _JSON)

    def _is(self, named: tuple[str, str], client_id: str, identity_id: str) -> bool:
        return named[0] == client_id and (not identity_id or named[1] == identity_id)

    def _delete(self, path: str, request: Request) -> Answer:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return Answer(401)
        if self.deletions:
            return self.deletions.pop()
        self.deleted.append(path)
        return Answer(202)


@contextmanager
def serving(service: AwsMetadata | AzureMetadata) -> Iterator[None]:
    """Serve at `service.url`."""
    with answering(lambda request: service.answer(request)) as url:
        service.url = url
        yield
