"""An etcd that wants certificates and a user."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.etcd_access import read_access
from sgl_tiered.pool.etcd_registry import EtcdRegistry
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
