"""AWS, as far as the provider asks it: moto's server, and before it what moto lacks.

Client tokens that hold within a zone, capacity, quotas, throttling, late lists, instances that take a
while to end, lost answers, tags on interfaces, true prices. Clients reach moto only through it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree

import boto3
from makara.manager.providers import Provider
from makara.manager.providers.aws import AwsProvider
from makara.manager.providers.opening import Render
from makara.manager.providers.settings import AwsRegion, AwsSettings
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Attempt, Market, Placement
from makara.protocol.messages import BootConfig
from moto.backends import get_backend
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from provider_troubles import CONSOLE, Trouble
from werkzeug.serving import WSGIRequestHandler, make_server

REGION, ZONES = "us-east-1", ("us-east-1a", "us-east-1b")
TYPE = "g4dn.xlarge"
PRICES = {TYPE: 0.526}  # on demand; disks and addresses below
SPOT = {"us-east-1a": 0.17, "us-east-1b": 0.21}
DISK_MONTH, ADDRESS_HOUR = 0.08, 0.005
LATE_S = 600.0
_FORMS = ("ec2", "sts", "cloudformation")  # how their requests are written
_NS = "{http://ec2.amazonaws.com/doc/2016-11-15/}"
_CODES = {
    Trouble.NO_CAPACITY: ("InsufficientInstanceCapacity", 500),
    Trouble.QUOTA: ("MaxSpotInstanceCountExceeded", 400),
    Trouble.REFUSED: ("UnauthorizedOperation", 403),
}
Answer = tuple[int, bytes]
ElementTree.register_namespace("", _NS.strip("{}"))


class Aws:
    """A WSGI application: one account of its own inside of moto."""

    def __init__(self, account: str) -> None:
        self.account = account
        self.troubles: set[Trouble] = set()
        self.quota: float | None = 64.0  # vCPUs, of each kind; None: the account has AWS's default
        self.default_quota: float | None = 64.0
        self.platform = "Linux/UNIX"  # as which images are billed
        self.expired = False  # the credentials
        self.listed: dict[str, float] = dict(PRICES)  # what the price list has
        self.history: dict[str, float] = dict(SPOT)  # of spot prices: the newest, by zone
        self.calls: list[str] = []
        self.later_pages: Counter[str] = Counter()  # those among them that went on with a list
        self.page_size: int | None = 2  # of lists; None: as it was asked for
        self.requests: list[dict[str, str]] = []  # of RunInstances, as they came
        self.hidden: set[str] = set()  # instances that no list has yet
        self.ending: set[str] = set()
        self.refusal: tuple[str, int] | None = None  # of the next RunInstances
        self.allows: Callable[[str, str, dict[str, str]], bool] = _everything
        self.not_allowed: tuple[str, int] = ("UnauthorizedOperation", 403)  # how EC2 refuses the rest
        self._tokens: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._lock = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)

    @property
    def ec2(self) -> Any:
        return ec2_backends[self.account][REGION]

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        service = environ["HTTP_AUTHORIZATION"].split("/")[3]
        form = dict(parse_qsl(body.decode())) if service in _FORMS else {}
        action = form.get("Action") or environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
        self.calls.append(action)
        self.later_pages[action] += "NextToken" in form
        if Trouble.UNREACHABLE in self.troubles:
            return _dropped(environ)
        status, answer, kept = self._answered(environ, action, form, body)
        if not kept:
            return _dropped(environ)
        kind = "application/x-amz-json-1.1" if answer.startswith(b"{") else "text/xml"
        start_response(f"{status} told", [("Content-Type", kind), ("Content-Length", str(len(answer)))])
        return [answer]

    def _answered(
        self, environ: dict[str, Any], action: str, form: dict[str, str], body: bytes
    ) -> tuple[int, bytes, bool]:
        if self.expired:
            return *_refused("ExpiredToken", 400), True
        if not self.allows(environ["HTTP_AUTHORIZATION"], action, form):
            return *_not_authorized(environ, self.not_allowed), True
        if Trouble.THROTTLED in self.troubles:
            return *_refused("RequestLimitExceeded", 503), True
        match action:
            case "RunInstances":
                return self._run(environ, form)
            case "TerminateInstances":
                status, answer = self._forward(environ, form)
                self.ending.update(value for key, value in form.items() if key.startswith("InstanceId."))
                return status, answer, True
            case "DescribeInstances":
                form, tokens = _without_token(form)
                status, answer = self._forward(environ, form)
                if tokens is not None:
                    answer = _with_tokens(answer, tokens)
                by_id = any(key.startswith("InstanceId.") for key in form)
                return status, self._as_told(answer, set() if by_id else self.hidden), True
            case "DescribeImages":
                status, answer = self._forward(environ, form)
                details = f"</imageId><platformDetails>{self.platform}</platformDetails>".encode()
                return status, answer.replace(b"</imageId>", details), True
            case "GetConsoleOutput":
                return 200, _console(form["InstanceId"]), True
            case "DescribeSpotPriceHistory":
                return 200, _spot_history(form["InstanceType.1"], self.history), True
            case "GetServiceQuota" | "GetAWSDefaultServiceQuota":
                value = self.quota if action == "GetServiceQuota" else self.default_quota
                if value is None:
                    return 400, b'{"__type": "NoSuchResourceException", "Message": "no such quota"}', True
                quota = {"QuotaCode": json.loads(body)["QuotaCode"], "QuotaName": "vCPUs", "Value": value}
                return 200, json.dumps({"Quota": quota}).encode(), True
            case "GetProducts":
                return 200, self._products(json.loads(body)), True
            case _:
                return *self._forward(environ, form), True

    def _run(self, environ: dict[str, Any], form: dict[str, str]) -> tuple[int, bytes, bool]:
        with self._lock:
            self.requests.append(form)
            refusal = self.refusal or next((_CODES[t] for t in sorted(self.troubles & _CODES.keys())), None)
            key = (form["NetworkInterface.1.SubnetId"], form["ClientToken"])
            if key not in self._tokens and refusal is not None:
                self.refusal = None
                return *_refused(*refusal), True
            digest = hashlib.sha256(urlencode(sorted(form.items())).encode()).hexdigest()
            if key in self._tokens:
                known, answer = self._tokens[key]
                if known != digest:
                    return *_refused("IdempotentParameterMismatch", 400), True
                return 200, self._as_told(answer, set()), True
            status, answer = self._forward(environ, form)
            if status == 200:
                self._tokens[key] = (digest, answer)
                self._made(answer, form)
            lost = Trouble.LOST_ANSWER in self.troubles
            self.troubles.discard(Trouble.LOST_ANSWER)
            return status, answer, not lost

    def _made(self, answer: bytes, form: dict[str, str]) -> None:
        """EC2 tags interfaces in the same call; moto does not."""
        (made,) = (self.ec2.get_instance(element.text) for element in _all(answer, "instanceId"))
        tags = _tags_of(form, "network-interface")
        for interface in made.nics.values():
            self.ec2.create_tags([interface.id], tags)
        if Trouble.LATE_LISTS in self.troubles:
            self.hidden.add(made.id)

    def _as_told(self, answer: bytes, hidden: set[str]) -> bytes:
        """Without what is hidden, and with the states of now."""
        root = ElementTree.fromstring(answer)
        for instances in root.findall(".//{*}instancesSet"):
            for item in list(instances):
                identity = str(item.findtext("{*}instanceId"))
                if identity in hidden:
                    instances.remove(item)
                    continue
                state = item.find("{*}instanceState/{*}name")
                assert state is not None
                state.text = (
                    "shutting-down" if identity in self.ending else self.ec2.get_instance(identity).state
                )
        return ElementTree.tostring(root)

    def _forward(self, environ: dict[str, Any], form: dict[str, str]) -> Answer:
        if "MaxResults" in form and self.page_size is not None:
            form = {**form, "MaxResults": str(self.page_size)}
        body = urlencode(form).encode()
        inner = {
            **environ,
            "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_X_MOTO_ACCOUNT_ID": self.account,
        }
        told: list[str] = []

        def start(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], Any]:
            told.append(status)
            return lambda data: None

        answer = b"".join(self._moto(inner, start))
        return int(told[0].split()[0]), answer

    def _products(self, question: dict[str, Any]) -> bytes:
        wanted = {entry["Field"]: entry["Value"] for entry in question["Filters"]}
        if question["ServiceCode"] == "AmazonVPC":
            found = [
                ("USE1-PublicIPv4:InUseAddress", "Hrs", ADDRESS_HOUR),
                ("USE1-PublicIPv4:ContiguousBlock", "Hrs", 2 * ADDRESS_HOUR),
            ]
        elif "volumeApiName" in wanted:
            found = [("EBS:VolumeUsage.gp3", "GB-Mo", DISK_MONTH)]
        else:
            named = wanted["instanceType"]
            found = [(f"BoxUsage:{named}", "Hrs", self.listed[named])] if named in self.listed else []
        free = [(usage, unit, 0.0) for usage, unit, _ in found]
        products = [json.dumps(_product(*entry)) for entry in (*found, *free)]
        return json.dumps({"FormatVersion": "aws_v1", "PriceList": products}).encode()


def _product(usage: str, unit: str, usd: float) -> dict[str, Any]:
    dimension = {"unit": unit, "pricePerUnit": {"USD": str(usd)}}
    return {
        "product": {"attributes": {"usagetype": usage}},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}},
    }


def _everything(authorization: str, action: str, form: dict[str, str]) -> bool:
    """Whoever signed a request may make it."""
    return True


def _refused(code: str, status: int) -> Answer:
    text = (
        f"<Response><Errors><Error><Code>{code}</Code><Message>told by the stand</Message></Error></Errors>"
    )
    return status, f"{text}<RequestID>r</RequestID></Response>".encode()


def _not_authorized(environ: dict[str, Any], refusal: tuple[str, int]) -> Answer:
    """In the form of the service that was asked."""
    if environ["HTTP_AUTHORIZATION"].split("/")[3] in _FORMS:
        return _refused(*refusal)
    return 400, json.dumps({"__type": "AccessDeniedException", "message": "told by the stand"}).encode()


def _dropped(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("the answer is lost")


def _console(instance: str) -> bytes:
    import base64

    text = base64.b64encode(("x" * 20000 + CONSOLE).encode()).decode()
    return _xml("GetConsoleOutputResponse", f"<instanceId>{instance}</instanceId><output>{text}</output>")


def _spot_history(instance_type: str, prices: dict[str, float]) -> bytes:
    items = "".join(
        f"<item><instanceType>{instance_type}</instanceType><productDescription>Linux/UNIX</productDescription>"
        f"<spotPrice>{price}</spotPrice><timestamp>2026-01-0{day}T00:00:00.000Z</timestamp>"
        f"<availabilityZone>{zone}</availabilityZone></item>"
        for zone, now in prices.items()
        for day, price in ((2, now), (1, 9.0))
    )
    return _xml("DescribeSpotPriceHistoryResponse", f"<spotPriceHistorySet>{items}</spotPriceHistorySet>")


def _xml(name: str, inner: str) -> bytes:
    return f'<{name} xmlns="{_NS[1:-1]}"><requestId>r</requestId>{inner}</{name}>'.encode()


def _all(answer: bytes, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(answer).findall(f".//{{*}}{name}")


def _without_token(form: dict[str, str]) -> tuple[dict[str, str], set[str] | None]:
    """moto has no filter of this name. (the others, the tokens that are looked for)."""
    place = next((k.removesuffix(".Name") for k, v in form.items() if v == "client-token"), None)
    if place is None:
        return form, None
    kept = {key: value for key, value in form.items() if not key.startswith(f"{place}.")}
    return kept, {value for key, value in form.items() if key.startswith(f"{place}.Value.")}


def _with_tokens(answer: bytes, tokens: set[str]) -> bytes:
    root = ElementTree.fromstring(answer)
    for instances in root.findall(".//{*}instancesSet"):
        for item in list(instances):
            if item.findtext("{*}clientToken") not in tokens:
                instances.remove(item)
    return ElementTree.tostring(root)


def _tags_of(form: dict[str, str], kind: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in form.items():
        match = re.fullmatch(r"(TagSpecification\.\d+)\.Tag\.(\d+)\.Key", key)
        if match is not None and form[f"{match[1]}.ResourceType"] == kind:
            found[value] = form[f"{match[1]}.Tag.{match[2]}.Value"]
    return found


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        logging.getLogger("moto").debug(message, *args)


class AwsStand:
    """An account with two zones, an image, and what the settings name."""

    troubles = frozenset(Trouble) - {Trouble.LEFTOVERS}
    counts_attempts = True
    remembers_ends = True

    def __init__(self, aws: Aws, endpoint: str) -> None:
        self.aws = aws
        self.endpoint = endpoint
        self.passed_s = 0.0
        self.now: Callable[[], float] = time.time
        self.user_data: Render = _user_data
        backend = aws.ec2
        self.image = next(i.id for i in backend.describe_images() if i.architecture == "x86_64")
        subnets = {subnet.availability_zone: subnet for subnet in backend.describe_subnets()}
        self._network = subnets[ZONES[0]].vpc_id
        group = backend.create_security_group("workers", "of tests", vpc_id=self._network)
        self.settings = AwsSettings(
            regions={
                REGION: AwsRegion(
                    subnets={zone: subnets[zone].id for zone in ZONES},
                    security_groups=[group.id],
                    image=self.image,
                )
            },
            endpoint_url=endpoint,
        )

    def provider(self, manager: str = "first") -> Provider:
        return self.aws_provider(manager)

    def aws_provider(
        self, manager: str = "first", session: boto3.Session | None = None, **changes: Any
    ) -> AwsProvider:
        return AwsProvider(
            self.settings.model_copy(update=changes),
            manager=manager,
            render=lambda attempt, boot: self.user_data(attempt, boot),
            session=session or _SESSION,
            clock=lambda: self.now() + self.passed_s,
        )

    def manager_group(self) -> str:
        """The security group of a manager's VM, beside which there is an instance profile for it."""
        iam_backends[self.aws.account]["aws"].create_instance_profile("makara-manager", "/", [])
        group = self.aws.ec2.create_security_group("manager", "of tests", vpc_id=self._network)
        return str(group.id)

    def attempt(self, vm: str, number: int = 1) -> Attempt:
        place = Placement(
            provider="aws", market=Market.SPOT, region=REGION, zone=ZONES[0], instance_type=TYPE
        )
        return Attempt(vm=vm, number=number, placement=place)

    def resources(self, **changes: object) -> Resources:
        return Resources.model_validate({"provider": "aws", "instance_type": TYPE, "max_nodes": 2, **changes})

    def trouble(self, trouble: Trouble) -> None:
        self.aws.troubles.add(trouble)

    def relieve(self, trouble: Trouble) -> None:
        self.aws.troubles.discard(trouble)

    def end(self, vm: str) -> None:
        ids = [i.id for i in self.aws.ec2.all_instances() if _vm_of(i) == vm and i.state != "terminated"]
        self.aws.ec2.terminate_instances(ids)

    def leave_disk(self, manager: str, vm: str) -> None:
        """One that hangs on no instance, as of a VM of that manager."""
        disk = self.aws.ec2.create_volume(size=8, zone_name=ZONES[0])
        tags = {"makara:manager": manager, "makara:vm": vm, "makara:attempt": "1"}
        self.aws.ec2.create_tags([disk.id], tags)

    def wait(self) -> None:
        self.passed_s += LATE_S
        self.aws.hidden.clear()
        self.aws.ending.clear()

    def billed(self) -> list[str]:
        backend = self.aws.ec2
        living = [i for i in backend.all_instances() if i.state != "terminated"]
        return [_vm_of(thing) for thing in (*living, *backend.volumes.values(), *backend.enis.values())]


def _user_data(attempt: Attempt, boot: BootConfig) -> bytes:
    return f"#cloud-config\n# {attempt.name}\n".encode()


def _vm_of(thing: Any) -> str:
    return next((tag["value"] for tag in thing.get_tags() if tag["key"] == "makara:vm"), "")


_SESSION = boto3.Session(aws_access_key_id="id", aws_secret_access_key="key", region_name=REGION)
_accounts = iter(range(100_000_000_000, 999_999_999_999))


@contextmanager
def aws_stand(folder: Path) -> Iterator[AwsStand]:
    get_backend("ec2")
    aws = Aws(str(next(_accounts)))
    server = make_server("127.0.0.1", 0, aws, threaded=True, request_handler=_Quiet)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield AwsStand(aws, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
