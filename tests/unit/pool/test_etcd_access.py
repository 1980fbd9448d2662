"""An etcd that wants certificates and a user."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.pool.etcd_access import read_access
from sgl_tiered.pool.etcd_registry import EtcdRegistry
from sgl_tiered.pool.membership import InstanceKind
from sgl_tiered.pool.registry_url import open_registry


class Gateway:
    """Answers who has the token of the day, and gives it for the right password."""

    def __init__(self) -> None:
        self.day = 1
        self.logins = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/v3/auth/authenticate":
            self.logins += 1
            if body == {"name": "tiered", "password": "a:b"}:
                return httpx.Response(200, json={"token": f"day-{self.day}"})
            return httpx.Response(400, json={"error": "invalid user or password"})
        told = request.headers.get("Authorization")
        if told is None:
            return httpx.Response(400, json={"error": "user name is empty"})
        if told != f"day-{self.day}":
            return httpx.Response(401, json={"error": "invalid auth token"})
        return httpx.Response(200, json={"header": {"revision": "3"}})


def registry(gateway: Gateway, folder: Path) -> EtcdRegistry:
    access = read_access(folder)
    client = httpx.Client(transport=httpx.MockTransport(gateway), auth=access.auth)
    return EtcdRegistry("http://127.0.0.1:1", client=client)


def with_user(folder: Path, text: str) -> Path:
    (folder / "user").write_text(text)
    (folder / "user").chmod(0o600)
    return folder


def test_a_user_gets_a_token_and_another_when_it_is_over(tmp_path: Path) -> None:
    """One login for many requests; a wrong password is no answer."""
    gateway = Gateway()
    asked = registry(gateway, with_user(tmp_path, "tiered:a:b\n"))
    for _ in range(3):
        found = asked.look()
        assert found is not None
        assert found.version == 3
    assert gateway.logins == 1
    gateway.day = 2
    assert asked.look() is not None
    assert gateway.logins == 2
    asked.close()
    wrong = registry(gateway, with_user(tmp_path, "tiered:else"))
    assert wrong.look() is None
    wrong.close()


def test_what_is_wrong_with_the_files_is_said(tmp_path: Path) -> None:
    """One sentence each, and no secret that others may read."""
    url = f"etcd+https://127.0.0.1:1/mine?access={tmp_path}"
    with pytest.raises(ConfigError, match="has neither"):
        open_registry(url)
    with_user(tmp_path, "no password").chmod(0o700)
    with pytest.raises(ConfigError, match="NAME:PASSWORD"):
        open_registry(url)
    (tmp_path / "user").chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        open_registry(url)
    with_user(tmp_path, "tiered:x")
    found = open_registry(url)
    assert isinstance(found, EtcdRegistry)
    assert found._urls == ("https://127.0.0.1:1/v3",)
    assert found._prefix == "/sgl-tiered/mine/"
    found.close()
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(ConfigError, match="certificates cannot be used"):
        open_registry(url)


class Authority:
    """Signs certificates, its own among them, that are good for a day."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.pem = self._signed(self._name, self._key, is_ca=True)

    def give(self, folder: Path, name: str) -> None:
        """Write a certificate and its key for somebody on this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / "cert.pem").write_bytes(self._signed(_named(name), key, is_ca=False))
        secret = folder / "key.pem"
        secret.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        secret.chmod(0o600)

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_ca: bool
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        hour = datetime.timedelta(hours=1)
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - hour,
            not_valid_after=now + 24 * hour,
        )
        limits = x509.BasicConstraints(ca=is_ca, path_length=None)
        builder = builder.add_extension(limits, critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([here]), False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


class Answers(BaseHTTPRequestHandler):
    """Says of every question that nothing is there, as an empty etcd's gateway."""

    def do_POST(self) -> None:
        """Note the path, and whose certificate was shown."""
        self.rfile.read(int(self.headers["Content-Length"]))
        shown = self.connection.getpeercert()  # type: ignore[attr-defined]
        (((_, name),),) = shown["subject"]
        self.server.heard.append((self.path, name))  # type: ignore[attr-defined]
        told = json.dumps({"header": {"revision": "3"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class TlsServer(ThreadingHTTPServer):
    """Wants a certificate of who asks; makes the handshake in the request's thread."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.heard: list[tuple[str, str]] = []
        context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem"
        )
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever shows no certificate is sent away without a word."""


@dataclass(frozen=True)
class TlsGateway:
    """The stand-in of an etcd with TLS, and who signs for it."""

    server: TlsServer
    authority: Authority

    def url(self, access: Path | None) -> str:
        url = f"etcd+https://127.0.0.1:{self.server.server_port}/mine"
        return url if access is None else f"{url}?access={access}"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TlsGateway]:
    """It wants certificates of the authority that has signed its own."""
    authority = Authority("one")
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "ca.pem").write_bytes(authority.pem)
    authority.give(folder, "etcd")
    with TlsServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield TlsGateway(server, authority)
        finally:
            server.shutdown()
            thread.join()


def test_the_right_certificates_connect(gateway: TlsGateway, tmp_path: Path) -> None:
    """Over TLS, and etcd sees whose certificate it is."""
    access = tmp_path / "access"
    access.mkdir()
    (access / "ca.pem").write_bytes(gateway.authority.pem)
    gateway.authority.give(access, "an instance")
    asked = open_registry(gateway.url(access))
    found = asked.look()
    assert found is not None
    assert found.version == 3
    assert gateway.server.heard == [("/v3/kv/range", "an instance")]
    asked.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("two", "one", "CERTIFICATE_VERIFY_FAILED"),  # who is etcd?
        (None, "one", "CERTIFICATE_VERIFY_FAILED"),  # no public authority knows it
        ("one", "two", "UNKNOWN_CA"),  # who are we?
        ("one", None, "CERTIFICATE_REQUIRED"),
    ],
)
def test_the_wrong_certificates_end_in_a_sentence(
    gateway: TlsGateway, tmp_path: Path, ours: str | None, theirs: str | None, said: str
) -> None:
    """It names what TLS found, and etcd hears nothing."""
    authorities = {"one": gateway.authority, "two": Authority("two")}
    access = tmp_path / "access"
    access.mkdir()
    if ours is not None:
        (access / "ca.pem").write_bytes(authorities[ours].pem)
    if theirs is not None:
        authorities[theirs].give(access, "an instance")
    asked = open_registry(gateway.url(access))
    with pytest.raises(TransportUnavailableError, match=said) as raised:
        asked.join("a", InstanceKind.PREFILL, {})
    assert "\n" not in str(raised.value)
    assert asked.look() is None
    assert gateway.server.heard == []
    asked.close()
