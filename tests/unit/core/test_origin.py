"""Requests of pages that are not ours, by what a browser says of them."""

from __future__ import annotations

import pytest

from sgl_tiered.core.origin import is_foreign

SITE = "elsewhere.example:30000"


@pytest.mark.parametrize("local", ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"])
def test_a_name_that_was_given_this_machines_address_is_foreign(local):
    """Origin and host are equal there, and nobody else's browser can come so."""
    assert is_foreign(f"http://{SITE}", SITE, local)
    assert is_foreign(
        "http://localhost.example:30000", "localhost.example:30000", local
    )
    for ours in ("127.0.0.1:30000", "localhost:30000", "[::1]:30000", "a.localhost:1"):
        assert not is_foreign(f"http://{ours}", ours, local)
    assert not is_foreign(None, SITE, local), "from no page"


@pytest.mark.parametrize("local", [None, "", "10.0.0.5", "a name", "fe80::1%eth0"])
def test_other_servers_are_called_by_their_names(local):
    """Also behind a proxy with a key, where the address is not told."""
    assert not is_foreign(f"http://{SITE}", SITE, local)
    assert not is_foreign(f"http://{SITE.upper()}", SITE, local)
    assert is_foreign(f"http://{SITE}", "127.0.0.1:30000", local)
