"""Which transport moves the KV, and what of it works on this machine."""

from __future__ import annotations

import importlib.util

from sgl_tiered.errors import ConfigError
from sgl_tiered.transport.base import Transport

__all__ = ["choose_transport", "has_accelerator", "open_transport"]

_FLAG = "--tiered-pd-transport"


def has_accelerator() -> bool:
    """Return whether KV lies on a device of its own."""
    import torch

    return bool(torch.accelerator.is_available())


def choose_transport(asked: str, *, on_device: bool) -> str:
    """Return the transport to open.

    Args:
        asked: ``auto`` or a name.
        on_device: whether KV lies on an accelerator.

    Raises:
        ConfigError: nothing fits; says what to install.
    """
    if asked == "auto":
        for name in ("mooncake",) if on_device else ("mooncake", "nixl"):
            if importlib.util.find_spec(name) is not None:
                return name
        raise ConfigError(
            _FLAG,
            "finds neither Mooncake nor NIXL here",
            "pip install 'sgl-tiered[mooncake]', or the extra for this CUDA",
        )
    if on_device and asked != "mooncake":
        raise ConfigError(
            _FLAG, f"{asked} moves main memory only so far", "give mooncake"
        )
    return asked


def open_transport(asked: str, host: str, devices: str | None) -> Transport:
    """Open a transport.

    Args:
        asked: ``auto``, mooncake, nixl or loopback (one machine, for tests).
        host: address that others reach this machine by.
        devices: RDMA cards; with them Mooncake speaks RDMA, else TCP.

    Raises:
        ConfigError: see ``choose_transport``.
        TransportUnavailableError: the library does not work here.
    """
    name = choose_transport(asked, on_device=has_accelerator())
    if name == "nixl":
        from sgl_tiered.transport.nixl import open_nixl

        return open_nixl()
    if name == "loopback":
        from sgl_tiered.transport.loopback import open_loopback

        return open_loopback()
    from sgl_tiered.transport.mooncake import open_mooncake

    protocol = "rdma" if devices else "tcp"
    return open_mooncake(host, protocol=protocol, devices=devices or "")
