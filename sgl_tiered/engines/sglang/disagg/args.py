"""The flags of disaggregated serving, as a layer of SGLang's arguments."""

from __future__ import annotations

from typing import Any, Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs

from sgl_tiered.cost.returning import RETURN_POLICIES
from sgl_tiered.engines.sglang.disagg.settings import PD_TRANSPORTS, declare_caching

__all__ = ["PdServerArgs"]

_NS = NS("tiered")


class PdServerArgs(ServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's arguments, and ours for servers that prefill or decode only."""

    tiered_pd_caching: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="With --disaggregation-mode: who keeps KV after a request, and who "
            "sends what: nobody (0), the prefill instance (1), the decode instance as "
            "well, which is then sent only what it lacks (2), and KV of answers goes "
            "back to the prefill instance's host tier (3). Default: as SGLang's own "
            "flags say; 2 on a decode instance with tiers. Needs "
            "--disaggregation-transfer-backend tiered.",
            choices=[0, 1, 2, 3],
        ),
        _NS,
    ] = None
    tiered_pd_transport: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="What moves KV from prefill to decode: mooncake (RDMA with "
            "--disaggregation-ib-device, else TCP), nixl, loopback (two servers on one "
            "machine, for tests), or auto (default), the first of them that is here.",
            choices=list(PD_TRANSPORTS),
        ),
        _NS,
    ] = None
    tiered_pd_returns: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="With --tiered-pd-caching 3 on decode: which answers go back to the "
            "prefill instance: those whose next turn is predicted to save more than "
            "their return costs (auto, default), or for experiments always or never.",
            choices=list(RETURN_POLICIES),
        ),
        _NS,
    ] = None

    def resolve_once(self) -> None:
        """Declare what a caching mode asks of SGLang, then resolve."""
        if not getattr(self, "_resolution_finished", False):
            asked: dict[str, Any] = declare_caching(self)
            if asked:
                declare_resolution(self, "sgl-tiered", **asked)
        super().resolve_once()
