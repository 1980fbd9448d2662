"""The servers of a cluster: what kind each is and by which flags. Flags are data.

Prefill and decode servers hand KV over by SGLang's own Mooncake backend on TCP
(``mooncake_tcp``), or by ours (``tiered``), which needs the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.systems import Device, Tiers, plain_spec

__all__ = [
    "COLOCATED",
    "DECODE",
    "KINDS",
    "ONE_THREAD",
    "PREFILL",
    "Handover",
    "Member",
    "mooncake",
    "new_member",
    "tiered",
]

PREFILL = "prefill"
DECODE = "decode"
COLOCATED = "colocated"
KINDS = (PREFILL, DECODE, COLOCATED)
ONE_THREAD: Mapping[str, str | None] = {
    "OMP_NUM_THREADS": "1",
    # What servers tell each other of where they are: this machine's own address.
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
}
"""Several servers on few cores stand in each other's way with more."""


@dataclass(frozen=True, slots=True)
class Member:
    """One server of a cluster.

    Attributes:
        spec: how to start it; its name is the instance's.
        kind: one of ``KINDS``.
        port: that it listens on.
        bootstrap_port: of a prefill server, where decode servers ask for it.
        event_port: where its KV events come from; None without.
    """

    spec: ServerSpec
    kind: str
    port: int
    bootstrap_port: int | None = None
    event_port: int | None = None

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.spec.name

    def word(self, url: str) -> str:
        """Return what the router is told of it, reached at ``url``."""
        parts = [url, f"kind={self.kind}", f"name={self.name}"]
        if self.bootstrap_port is not None:
            parts.append(f"bootstrap={self.bootstrap_port}")
        return ",".join(parts)


@dataclass(frozen=True, slots=True)
class Handover:
    """How prefill and decode servers of a cluster hand KV over.

    Attributes:
        name: of the transfer backend.
        prefill: flags of prefill servers.
        decode: flags of decode servers.
        env: variables of both.
    """

    name: str
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    env: Mapping[str, str | None] | None = None


def mooncake(caches: bool = True) -> Handover:
    """Return SGLang's own hand-over, as its authors run it where there is only TCP.

    Args:
        caches: whether both sides keep a radix cache.
    """
    # Without a GPU two of SGLang's paths ask for one; both have a switch.
    return Handover(
        "mooncake_tcp",
        () if caches else ("--disable-radix-cache",),
        (
            "--disaggregation-decode-retraction-backup",
            "cpu_tensor",
            *(("--disaggregation-decode-enable-radix-cache",) if caches else ()),
        ),
        {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"},
    )


def tiered(caching: int, pool: str, host_bytes: int) -> Handover:
    """Return our own hand-over.

    Args:
        caching: ``--tiered-pd-caching``, 0 to 3.
        pool: URL of the registry, over which the sides of mode 3 find each other.
        host_bytes: of the host tier that mode 3 returns KV to, on each side.
    """
    ours: tuple[str, ...] = ("--tiered-pd-caching", str(caching))
    if caching == 3:
        ours += (*Tiers(host_bytes).flags, "--tiered-pool", pool)
    return Handover("tiered", ours, ours)


def new_member(
    device: Device,
    kind: str,
    name: str,
    ports: Ports,
    *,
    handover: Handover | None = None,
    flags: Sequence[str] = (),
    events: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> Member:
    """Return a server that is not started yet.

    Args:
        device: model, device pool and page, and flags of all.
        kind: one of ``KINDS``.
        name: of the instance.
        ports: where its ports come from.
        handover: for prefill and decode servers.
        flags: further ones of its own.
        events: whether it publishes KV events.
        env: variables besides ``ONE_THREAD``.

    Raises:
        ValueError: a prefill or decode server without a hand-over.
    """
    every = list(flags)
    bootstrap_port = event_port = None
    variables = {**ONE_THREAD, **(env or {})}
    if kind != COLOCATED:
        if handover is None:
            raise ValueError(f"{name}: a {kind} server needs a hand-over")
        every += ["--disaggregation-mode", kind]
        every += ["--disaggregation-transfer-backend", handover.name]
        every += handover.prefill if kind == PREFILL else handover.decode
        variables |= handover.env or {}
        if kind == PREFILL:
            bootstrap_port = ports.take()
            every += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if events:
        event_port, replay_port = ports.take(), ports.take()
        told = {
            "publisher": "zmq",
            # A star makes SGLang bind; with an address it connects instead.
            "endpoint": f"tcp://*:{event_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        every += ["--kv-events-config", json.dumps(told)]
    spec = plain_spec(device, name, every)
    spec = ServerSpec(spec.name, spec.model, spec.flags, variables)
    return Member(spec, kind, ports.take(), bootstrap_port, event_port)
