"""Endpoints of the HTTP process.

``GET /tiered/stats``, ``POST /tiered/drop?tier=NAME`` and, to compare load policies on
one server, ``POST /tiered/load-policy?policy=NAME``.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.cache.config import LOAD_POLICIES

__all__ = ["DROP_KNOBS", "LOAD_POLICY_KNOB", "http_hooks"]

DROP_KNOBS = {
    "device": "tiered_drop_device",
    "host": "tiered_drop_host",
    "disk": "tiered_drop_disk",
}
"""Tier -> key of SGLang's ``set_internal_state``, which carries numbers only."""
LOAD_POLICY_KNOB = "tiered_load_policy"
"""Its number is the place of the policy in ``LOAD_POLICIES``."""


def http_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of the process that serves HTTP."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (
            "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
            _add_endpoints,
            HookType.BEFORE,
        )
    ]


def _add_endpoints(server_args: Any, *args: Any, **kwargs: Any) -> None:
    from sgl_tiered.engines.sglang.config import BACKEND_NAME

    if server_args.radix_cache_backend != BACKEND_NAME:
        return
    from fastapi import HTTPException
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq

    @http_server.app.get("/tiered/stats")
    async def tiered_stats() -> Any:
        """Return the state of the tiers, one element per scheduler."""
        manager = http_server._global_state.tokenizer_manager
        states = await manager.get_internal_state()
        return [state.get("tiered") for state in states]

    @http_server.app.post("/tiered/drop")
    async def tiered_drop(tier: str) -> Any:
        """Forget every page of one tier: device, host or disk."""
        if tier not in DROP_KNOBS:
            raise HTTPException(
                400, f"tier: {tier!r} is unknown; use {', '.join(DROP_KNOBS)}."
            )
        manager = http_server._global_state.tokenizer_manager
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={DROP_KNOBS[tier]: 1})
        )
        if not all(done):
            raise HTTPException(409, "Requests are running; try again when idle.")
        return {"dropped": tier}

    @http_server.app.post("/tiered/load-policy")
    async def tiered_load_policy(policy: str) -> Any:
        """Load by another policy from now on: auto, always or never."""
        if policy not in LOAD_POLICIES:
            raise HTTPException(
                400, f"policy: {policy!r} is unknown; use {', '.join(LOAD_POLICIES)}."
            )
        manager = http_server._global_state.tokenizer_manager
        number = LOAD_POLICIES.index(policy)
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={LOAD_POLICY_KNOB: number})
        )
        if not all(done):
            raise HTTPException(409, "Requests are running; try again when idle.")
        return {"load_policy": policy}
