"""Runs on the manager's VM, from its user data, with the image's own Python: waits for whoever called `makara
up`, takes Makara and its settings from them, and has both installed.

Argument: the folder with boot.json and end_vm.py. Strangers may connect: the secret of the user data proves
each side to the other, for some minutes, and nothing but the payload whose checksum the user data names is
taken. Whatever fails before a manager answers, the VM is ended.
"""

import collections
import contextlib
import hashlib
import hmac
import http.server
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from typing import Any

TIMEOUT_S, STRANGERS_S, TRIES, PAUSE_S = 60, 10, 3, 20
MOST_BYTES, MOST_HELLO, MOST_CONNECTIONS = 64 << 20, 4096, 32
UNIT = "makara-manager-boot.service"
DAY_S = 86400
REQUEST = [
    *("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-subj", "/CN=Makara manager's authority", "-keyout", "ca.key", "-out", "ca.csr"),
]
SIGN = [
    *("openssl", "ca", "-batch", "-selfsign", "-notext", "-config", "ca.conf"),
    *("-keyfile", "ca.key", "-in", "ca.csr", "-out", "ca.pem.new"),
]
CONFIG = """
[ca]
default_ca = ours
[ours]
database = ca.index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = named
x509_extensions = authority
[named]
commonName = supplied
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, digitalSignature, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""


def main(folder: str, root: str = "/") -> None:
    os.umask(0o077)
    with open(os.path.join(folder, "boot.json")) as file:
        boot = json.load(file)
    done = False
    try:
        done = prepare(folder, root, boot)
    finally:  # what nobody thought of is no reason to stay and bill
        if not done:
            end(folder, boot)
    subprocess.run(["systemctl", "disable", UNIT])


def prepare(folder: str, root: str, boot: dict[str, Any]) -> bool:
    """Whether a manager runs here."""
    if not exists(folder, "paired") and not pair(folder, boot):
        return False
    for _ in range(TRIES):
        if exists(folder, "installed") or install(folder, root):
            return True
        time.sleep(PAUSE_S)
    return False


# ---- who called `makara up` --------------------------------------------------------------------------------


def pair(folder: str, boot: dict[str, Any]) -> bool:
    """Whether they came in time."""
    make_authority(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.path.join(folder, "ca.pem"), os.path.join(folder, "ca.key"))
    server = Server((boot["host"], boot["port"]), folder, boot, context)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    say(f"waiting for {boot['pair_within_s']} s on port {boot['port']}")
    server.paired.wait(boot["pair_within_s"])
    with server.lock:  # never between the payload and its mark
        server.closed = True
    server.shutdown()
    server.server_close()
    return exists(folder, "paired")


def make_authority(folder: str) -> None:
    """The manager's own, under which its certificates will be. It is valid since a day ago, for other
    machines' clocks; `openssl req` can say that from version 3.4 on, `openssl ca` always could."""
    if exists(folder, "ca.pem"):
        return
    for name, text in {"ca.conf": CONFIG, "ca.index": ""}.items():
        keep(folder, name, text.encode())
    now = time.time()
    first, last = (time.strftime("%Y%m%d%H%M%SZ", time.gmtime(now + days * DAY_S)) for days in (-1, 7300))
    subprocess.run(REQUEST, cwd=folder, check=True)
    subprocess.run([*SIGN, "-startdate", first, "-enddate", last], cwd=folder, check=True)
    os.rename(os.path.join(folder, "ca.pem.new"), os.path.join(folder, "ca.pem"))


def proof(secret: str, *parts: str) -> str:
    text = json.dumps(["makara up", *parts])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], folder: str, boot: dict[str, Any], context: ssl.SSLContext
    ) -> None:
        self.folder, self.boot, self.context = folder, boot, context
        self.lock, self.paired, self.closed = threading.Lock(), threading.Event(), False
        self.strangers: collections.deque[socket.socket] = collections.deque()  # the oldest first
        with open(os.path.join(folder, "ca.pem")) as file:
            self.certificate = ssl.PEM_cert_to_DER_cert(file.read()).hex()
        super().__init__(address, http.server.BaseHTTPRequestHandler)  # see `finish_request`

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own: who is slow or silent keeps nobody else."""
        mine = request.dup()  # to shut it down by, whatever TLS does with the other one
        self.strangers.append(mine)
        with contextlib.suppress(IndexError, OSError):
            while len(self.strangers) > MOST_CONNECTIONS:
                self.strangers.popleft().shutdown(socket.SHUT_RDWR)  # the oldest makes room
        try:
            request.settimeout(STRANGERS_S)
            with self.context.wrap_socket(request, server_side=True) as connection:
                Exchange(connection, client_address, self, mine)
        finally:
            self.known(mine)
            mine.close()

    def known(self, connection: socket.socket) -> None:
        with contextlib.suppress(ValueError):
            self.strangers.remove(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        say(f"{client_address[0]}: {sys.exc_info()[1]!r}")

    def take(self, payload: bytes, told: str) -> int:
        """Keep it, unless somebody has been before; an HTTP status."""
        if hashlib.sha256(payload).hexdigest() != self.boot["payload_sha256"]:
            return 422
        with self.lock:
            if self.closed or exists(self.folder, "paired"):
                return 409
            keep(self.folder, "payload.zip", payload)
            keep(self.folder, "told.json", told.encode())
            keep(self.folder, "paired", b"")
        return 200


class Exchange(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, request: Any, client_address: Any, server: Server, stranger: socket.socket) -> None:
        self.stranger, self.nonce = stranger, ""
        super().__init__(request, client_address, server)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else -1
        if self.path == "/hello" and 0 <= size <= MOST_HELLO:
            self.hello(self.rfile.read(size).decode("ascii", "replace"))
        elif self.path == "/payload" and 0 <= size <= MOST_BYTES:
            self.payload(size)
        else:
            self.answer(404, {})

    def hello(self, theirs: str) -> None:
        """Show them that this is the VM which they asked for."""
        self.nonce = secrets.token_hex(16)
        self.answer(200, {"nonce": self.nonce, "proof": self.proof("vm", theirs, self.nonce)})

    def payload(self, size: int) -> None:
        """Let them show first that they asked for this VM, on the connection on which they were greeted."""
        ours, told = self.headers.get("Makara-Nonce", ""), self.headers.get("Makara-Told", "")
        shown = self.headers.get("Makara-Proof", "").encode()
        mine = self.proof("owner", ours, told, self.server.boot["payload_sha256"])
        if not hmac.compare_digest(shown, mine.encode()) or not ours or ours != self.nonce:
            self.close_connection = True  # what they send is not read
            self.answer(403, {})
            return
        self.nonce = ""
        self.server.known(self.stranger)
        self.connection.settimeout(TIMEOUT_S)
        status = self.server.take(self.rfile.read(size), told)
        self.answer(status, {"proof": self.proof("taken", ours)} if status == 200 else {})
        if status == 200:
            self.server.paired.set()

    def proof(self, *parts: str) -> str:
        return proof(self.server.boot["secret"], self.server.certificate, *parts)

    def answer(self, status: int, body: dict[str, str]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        say(f"{self.client_address[0]}: {format % args}")


# ---- afterwards --------------------------------------------------------------------------------------------

_INSTALL = """
import sys
sys.path.insert(0, sys.argv[1])
from makara.manager.hosting.installing import main
main(*sys.argv[2:])
"""


def install(folder: str, root: str) -> bool:
    """By the program that came with the payload; whether it succeeded."""
    payload, code = os.path.join(folder, "payload"), os.path.join(folder, "code")
    for inner in (payload, code):
        shutil.rmtree(inner, ignore_errors=True)
    with zipfile.ZipFile(os.path.join(folder, "payload.zip")) as archive:
        archive.extractall(payload)
    (wheel,) = (name for name in os.listdir(payload) if name.endswith(".whl"))
    with zipfile.ZipFile(os.path.join(payload, wheel)) as archive:
        archive.extractall(code)
    done = subprocess.run([sys.executable, "-c", _INSTALL, code, folder, root]).returncode == 0
    if done:
        try:
            keep(folder, "installed", b"")
        except OSError as error:  # the manager runs
            say(f"{folder}/installed: {error}")
    return done


def end(folder: str, boot: dict[str, Any]) -> None:
    """Have the VM cost nothing any more. Raises `CalledProcessError`, at which its unit powers it off."""
    program, file = (os.path.join(folder, name) for name in ("end_vm.py", "boot.json"))
    subprocess.run([sys.executable, program, file, str(boot["delete_for_s"])], check=True)


def exists(folder: str, name: str) -> bool:
    return os.path.exists(os.path.join(folder, name))


def keep(folder: str, name: str, data: bytes) -> None:
    path = os.path.join(folder, name)
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)


def say(text: str) -> None:
    print(f"makara: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
