"""The manager's own authority, and who speaks to the manager under it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from makara.manager import authority as authority_module
from makara.manager import server
from makara.manager.authority import Authority, names_of
from makara.manager.cli import main as cli
from makara.manager.cli.client import Client, Unreachable
from makara.manager.config import ServerConfig, write_private
from makara.manager.home import ConfigError
from makara.protocol.messages import BootConfig
from makara.worker.agent import agent
from makara.worker.agent.bundles import fetch_secrets
from makara.worker.agent.connection import ManagerConnection
from managers import Manager, release_all
from tls_server import tls_server

DAY_S = 86400.0


class Wall:
    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def authority(tmp_path: Path, wall: Wall) -> Authority:
    return Authority(tmp_path / "home", names_of("127.0.0.1"), wall)


def shown(address: tuple[str, int], ca: str) -> x509.Certificate:
    context = ssl.create_default_context(cadata=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13 asks for it
    with (
        socket.create_connection(address) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")


def test_who_knows_the_authority_trusts_each_certificate_that_it_renews(tmp_path: Path) -> None:
    authority = Authority(tmp_path, names_of("127.0.0.1"))
    with tls_server(authority) as address:
        first = shown(address, authority.certificate)
        authority.renew()
        second = shown(address, authority.certificate)
        assert first.serial_number != second.serial_number
        other = Authority(tmp_path / "other", names_of("127.0.0.1"))
        with pytest.raises(ssl.SSLCertVerificationError):
            shown(address, other.certificate)


def test_a_certificate_is_renewed_long_before_it_ends(authority: Authority, wall: Wall) -> None:
    assert not authority.renew_if_due()
    wall.now += 25 * DAY_S
    assert not authority.renew_if_due()
    wall.now += 10 * DAY_S
    assert authority.renew_if_due()
    assert not authority.renew_if_due()


def test_a_renewal_that_fails_is_told_and_tried_again(
    authority: Authority, wall: Wall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = asyncio.Event()
    failures = [OSError(28, "No space left on device")] * 2

    def write(path: Path, content: bytes) -> None:
        if failures:
            raise failures.pop()
        write_private(path, content)
        written.set()

    monkeypatch.setattr(authority_module, "write_private", write)
    monkeypatch.setattr(authority_module, "_LOOK_S", 0.0)

    async def play() -> None:
        renewing = asyncio.create_task(authority.keep_renewed())
        waiting = asyncio.create_task(written.wait())
        await asyncio.wait([renewing, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), "renewing goes on until the disk has room"
        renewing.cancel()

    wall.now += 40 * DAY_S
    asyncio.run(play())
    assert caplog.text.count("No space left on device") == 2
    assert not authority.renew_if_due()


def test_a_certificate_is_good_for_a_machine_whose_clock_is_hours_behind(tmp_path: Path, wall: Wall) -> None:
    Authority(tmp_path, ["localhost"], wall)
    leaf, ca = (x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in ("tls.pem", "ca.pem"))
    for certificate in (leaf, ca):
        assert wall.now - certificate.not_valid_before_utc.timestamp() >= 12 * 3600
    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc < timedelta(days=100)


def test_a_certificate_has_every_name_that_the_manager_is_given(tmp_path: Path) -> None:
    config = ServerConfig(
        home=tmp_path, tls=True, public_url="https://10.0.0.4:8700", names=("192.0.2.9", "makara.example")
    )
    assert server._authority(config) is not None
    (certificate,) = x509.load_pem_x509_certificates((tmp_path / "tls.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"10.0.0.4", "192.0.2.9"} <= set(map(str, names.get_values_for_type(x509.IPAddress)))
    assert "makara.example" in names.get_values_for_type(x509.DNSName)


def test_keys_are_readable_by_their_user_only_and_kept(tmp_path: Path) -> None:
    first = Authority(tmp_path, ["localhost"])
    assert Authority(tmp_path, ["localhost"]).certificate == first.certificate
    for name in ("ca.key", "tls.pem"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert "PRIVATE" not in (tmp_path / "ca.pem").read_text()


def test_an_authority_that_cannot_be_used_is_named(tmp_path: Path, wall: Wall) -> None:
    home = tmp_path / "home"
    Authority(home, ["localhost"], wall)
    wall.now += 20 * 365 * DAY_S
    with pytest.raises(ConfigError, match=r"ca\.pem: it ends on"):
        Authority(home, ["localhost"], wall)
    Authority(tmp_path / "other", ["localhost"], wall)
    (home / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not its key"):
        Authority(home, ["localhost"], wall)
    (home / "ca.pem").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority(home, ["localhost"], wall)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host": "0.0.0.0", "allow_remote": True, "tls": False}, "tls"),
        ({"public_url": "http://manager.example:8700"}, "public_url"),
        ({"public_url": "manager.example"}, "public_url"),
        ({"public_url": "https://[1"}, "public_url"),
    ],
)
def test_plain_http_beyond_loopback_is_refused(
    tmp_path: Path, settings: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        ServerConfig(home=tmp_path, **settings)  # pyright: ignore[reportArgumentType]


def test_a_command_sends_no_token_by_plain_http_beyond_loopback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["ps", "--server", "http://192.0.2.1:8700", "--token", "x.y"]) == 2
    assert "plain HTTP beyond loopback" in capsys.readouterr().err
    nothing = tmp_path / "none.pem"
    there = ["ps", "--server", "https://127.0.0.1:1", "--token", "x.y", "--ca-file", str(nothing)]
    assert cli.main(there) == 2
    assert f"ca_file: {nothing}" in capsys.readouterr().err


def test_an_agent_shows_its_secret_neither_in_plain_nor_to_whom_nobody_vouches_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "boot.json"
    boot = BootConfig(
        vm="v", job="j", manager_url="http://192.0.2.1", join_token="s", directory=str(tmp_path)
    )
    monkeypatch.setattr("sys.argv", ["agent", str(file)])
    for change, field in (({}, "manager_url"), ({"manager_url": "https://192.0.2.1", "ca": "none"}, "ca")):
        file.write_text(boot.model_copy(update=change).model_dump_json())
        with pytest.raises(SystemExit, match=f"{field}: "):
            agent.main()


# ---- a manager that listens --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    running = Manager(tmp_path_factory.mktemp("tls") / "home", tls=True).start()
    yield running
    running.stop()
    release_all(running.home)


def test_a_job_trains_over_tls_and_commands_find_the_authority(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert manager.url.startswith("https://")
    job = manager.submit(tmp_path / "store", training={"steps": 10**6}).json()["job"]
    manager.wait(job, lambda view: len([vm for vm in view["vms"] if vm["joined_at"]]) == 2)
    assert cli.main(["ps", "--home", str(manager.home)]) == 0
    assert job in capsys.readouterr().out
    ca = ["--ca-file", str(manager.home / "ca.pem")]
    named = ["ps", "--server", manager.url, "--token", manager.token]
    assert cli.main([*named, *ca]) == 0
    assert cli.main(named) == 3  # the system's authorities do not know it
    manager.client.post(f"/jobs/{job}/stop")


def test_nobody_speaks_to_a_manager_of_another_authority(manager: Manager, tmp_path: Path) -> None:
    other = Authority(tmp_path, ["localhost", "127.0.0.1"])
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        Client(manager.url, manager.token, tmp_path / "ca.pem").get("/jobs")
    for ca in (other.certificate, None):
        boot = BootConfig(
            vm="v", job="j", manager_url=manager.url, ca=ca, join_token="a.b", directory=str(tmp_path)
        )
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(fetch_secrets(boot, boot.join_token))
        assert refusal(boot) is None
    known = boot.model_copy(update={"ca": (manager.home / "ca.pem").read_text()})
    assert refusal(known) == "unknown token"


def refusal(boot: BootConfig) -> str | None:
    """What the manager says to an agent with this boot file, if it is taken for one."""

    class Nobody:
        def obey(self, orders: object) -> None: ...

        def acknowledge(self, sequence: int) -> None: ...

        def report(self, limit_bytes: int, *, is_first: bool, may_beat: bool) -> tuple[str, bool]:
            raise AssertionError("not let in")

    async def once() -> str | None:
        connection = ManagerConnection(boot, Nobody())
        await connection._connect()
        return connection.refusal

    return asyncio.run(once())


def test_a_manager_says_by_which_url_it_is_reached(manager: Manager) -> None:
    assert json.loads((manager.home / "server.json").read_text())["url"] == manager.url
