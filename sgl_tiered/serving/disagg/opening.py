"""Which transport moves the KV, and what of it works on this machine."""

from __future__ import annotations

from sgl_tiered.errors import ConfigError
from sgl_tiered.transport.base import Transport
from sgl_tiered.transport.by_name import open_transport
from sgl_tiered.transport.mooncake import open_mooncake

__all__ = ["open_kv_transport"]

_GRACE_S = 10.0
"""After the library's last word on each piece of a failed push. The session rests and
the decode instance holds its memory for so long, so it is shorter than a pool's."""


def open_kv_transport(
    asked: str, host: str, devices: str | None, *, on_device: bool
) -> Transport:
    """Open the transport between prefill and decode instances.

    Args:
        asked: ``auto``, mooncake, nixl or loopback (one machine, for tests).
        host: address that others reach this machine by.
        devices: RDMA cards; with them Mooncake speaks RDMA, else TCP.
        on_device: whether KV lies on an accelerator.

    Raises:
        ConfigError: it does not go with the device.
        TransportUnavailableError: the library does not work here.
    """
    if not on_device and not devices:
        return open_transport(asked, host, grace_s=_GRACE_S)
    if asked not in ("auto", "mooncake"):
        place = "the memory of a device" if on_device else "RDMA cards"
        raise ConfigError(
            "--tiered-pd-transport",
            f"{asked} was not made for {place}",
            "give mooncake",
        )
    protocol = "rdma" if devices else "tcp"
    return open_mooncake(
        host, protocol=protocol, devices=devices or "", grace_s=_GRACE_S
    )
