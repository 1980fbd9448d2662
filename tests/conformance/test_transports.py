"""Our transports under the kit: Mooncake, NIXL and the one for tests."""

from __future__ import annotations

from sgl_tiered.testing.transport_kit import TransportKit


class TestLoopback(TransportKit):
    """Copies by the kernel."""

    OPEN = "sgl_tiered.transport.loopback:open_loopback"


class TestMooncake(TransportKit):
    """TCP, metadata from peer to peer."""

    OPEN = "sgl_tiered.transport.mooncake:open_mooncake"


class TestNixl(TransportKit):
    """UCX over TCP, as between two machines."""

    OPEN = "sgl_tiered.transport.nixl:open_nixl"
    # With shared memory the kernel would serve a stopped peer's memory.
    ENVIRONMENT = {"UCX_TLS": "tcp"}  # noqa: RUF012 - the base class says ClassVar
