"""Key files, and which endpoints are this machine's alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.transport.keys import KeyPair, is_loopback, load_keys, make_keys


def test_a_key_file_comes_back_and_is_private(tmp_path: Path) -> None:
    """Mode 0600, the same pair, and no secret in what may be logged."""
    path = tmp_path / "key"
    keys = make_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(path) == keys
    assert keys.secret not in repr(keys)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    """An old file stays, and a link is not followed."""
    path = tmp_path / "key"
    keys = make_keys(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target in (path, tmp_path / "link"):
        with pytest.raises(FileExistsError):
            make_keys(target)
    assert load_keys(path) == keys


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A secret that is none is said, with what to do."""
    path = tmp_path / "key"
    make_keys(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="lets others read it; chmod 600"):
        load_keys(path)


@pytest.mark.parametrize("mixed", ["", "{}", "not json", '{"public":"a","secret":"b"}'])
def test_what_is_no_key_file_is_refused(tmp_path: Path, mixed: str) -> None:
    """Nothing but a whole pair is accepted."""
    path = tmp_path / "key"
    path.write_text(mixed)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no key file"):
        load_keys(path)


def test_a_pair_of_two_pairs_is_refused(tmp_path: Path) -> None:
    """Public and secret key must belong together."""
    one, two = make_keys(tmp_path / "one"), make_keys(tmp_path / "two")
    path = tmp_path / "mixed"
    path.write_text(f'{{"public":"{one.public}","secret":"{two.secret}"}}')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="belong together"):
        load_keys(path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    """With what makes one."""
    with pytest.raises(ConfigError, match="make_keys"):
        load_keys(tmp_path / "key")


def test_a_key_of_another_length_is_a_defect() -> None:
    """A pair checks itself."""
    with pytest.raises(ValueError, match="40 characters"):
        KeyPair("short", "short")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.8.9.1:50", True),
        ("tcp://localhost:50", True),
        ("tcp://[::1]:50", True),
        ("inproc://x", True),
        ("ipc:///run/x", True),
        ("tcp://*:50", False),
        ("tcp://0.0.0.0:50", False),
        ("tcp://[::]:50", False),
        ("tcp://eth0:50", False),
        ("tcp://127.0.0.1.example.org:50", False),
        ("tcp://10.0.0.1:50", False),
        ("udp://127.0.0.1:50", False),
    ],
)
def test_what_is_loopback(endpoint: str, expected: bool) -> None:
    """Only what nobody else can reach by any name."""
    assert is_loopback(endpoint) is expected
