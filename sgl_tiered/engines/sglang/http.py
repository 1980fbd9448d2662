"""Endpoints of the HTTP process.

``GET /tiered/stats``, ``POST /tiered/drop?tier=NAME``; what became of requests
(metrics/EXPLAIN.md): ``GET /tiered/explain/RID`` and ``GET /tiered/explain?last=N`` or
``?slowest=N``; for ``sgl-tiered profile``, ``GET /tiered/profile`` and ``POST
/tiered/profile?local=N`` or ``?on=false``; to compare load policies on one server,
``POST /tiered/load-policy?policy=NAME``; and for tests, where the environment allows
faults, ``POST /tiered/faults?emulate=TEXT``.

All but the stats want the key that SGLang's ``/flush_cache`` wants, which is
``--admin-api-key`` if there is one, else ``--api-key``. The stats are part of
``/server_info`` and want what it wants. None of them serves a page of another origin.
"""

from __future__ import annotations

import json
from typing import Any

from sgl_tiered.cache.config import LOAD_POLICIES
from sgl_tiered.core.origin import is_foreign
from sgl_tiered.engines.sglang.pooled.hints import add_hints
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.emulation import parse_emulation

__all__ = [
    "DROP_KNOBS",
    "EXPLAIN_KEY",
    "FAULTS_KEY",
    "LOAD_POLICY_KNOB",
    "PROFILE_KEY",
    "PROFILE_KNOB",
    "http_hooks",
]

DROP_KNOBS = {
    "device": "tiered_drop_device",
    "host": "tiered_drop_host",
    "cxl": "tiered_drop_cxl",
    "disk": "tiered_drop_disk",
}
"""Tier -> key of SGLang's ``set_internal_state``, which carries numbers only."""
EXPLAIN_KEY = "tiered_explain:"
"""Before our question in the ``rid`` of SGLang's request for its state."""
FAULTS_KEY = "tiered_faults:"
"""Before the text of ``POST /tiered/faults``: values are numbers, keys are texts."""
LOAD_POLICY_KNOB = "tiered_load_policy"
"""Its number is the place of the policy in ``LOAD_POLICIES``."""

PROFILE_KEY = "tiered_profile:"
"""The ``rid`` of SGLang's request for its state that asks for the profile's sums."""
PROFILE_KNOB = "tiered_profile"
"""Its number is the local tokens of the sums that begin; -1 ends them."""
_MAX_NUMBER = 10**6
"""Of requests or tokens in a question."""


def http_hooks() -> list[tuple[str, Any, Any]]:
    """Return the hooks of the process that serves HTTP."""
    from sglang.srt.plugins.hook_registry import HookType

    return [
        (
            "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
            _add_endpoints,
            HookType.BEFORE,
        ),
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            add_hints,
            HookType.BEFORE,
        ),
    ]


def _add_endpoints(server_args: Any, *args: Any, **kwargs: Any) -> None:
    from sgl_tiered.serving.option_reader import FAULT_ENV, faults_allowed
    from sgl_tiered.serving.options import BACKEND_NAME, EMULATED_TIERS

    if server_args.radix_cache_backend != BACKEND_NAME:
        return
    from fastapi import Depends, Header, HTTPException, Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GetInternalStateReq, SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def refused(status: int, reason: str, sentence: str) -> HTTPException:
        """Count a refusal, and return what to raise."""
        _count_refusal(reason)
        return HTTPException(status, sentence)

    has_key = server_args.api_key or server_args.admin_api_key

    async def refuse_foreign(
        request: Any, origin: str | None = Header(None), host: str = Header("")
    ) -> None:
        """Refuse what a browser sends for a page of another origin."""
        local = None if has_key else (request.scope.get("server") or [None])[0]
        if is_foreign(origin, host, local):
            raise refused(
                403,
                "origin",
                f"A page of {str(origin)[:100]!r} may not call this server; call it "
                "without a browser.",
            )

    # FastAPI looks for names of types in the module, which does without FastAPI.
    refuse_foreign.__annotations__["request"] = Request

    async def ask_state(rid: str, name: str) -> list[Any]:
        """Ask every scheduler; SGLang's question for the state carries ours as rid."""
        manager = http_server._global_state.tokenizer_manager
        manager.auto_create_handle_loop()
        request = GetInternalStateReq(rid=rid)
        answers = await manager.get_internal_state_communicator(request)
        return [answer.internal_state.get(name) for answer in answers]

    async def ask(question: dict[str, Any]) -> list[Any]:
        return await ask_state(EXPLAIN_KEY + json.dumps(question), "tiered_explain")

    async def tiered_explain(rid: str) -> Any:
        """Return what became of one request."""
        found = [told for told in await ask({"rid": rid}) if told is not None]
        if not found:
            raise refused(
                404,
                "unknown",
                f"{rid[:100]!r} is not known: it is not here, or ended too long ago "
                "(--tiered-explain-last).",
            )
        return found[0]

    async def tiered_explain_some(last: int = 20, slowest: int = 0) -> Any:
        """Return what became of the last requests, or of the slowest of those kept."""
        if not 0 <= min(last, slowest) <= max(last, slowest) <= _MAX_NUMBER:
            raise refused(400, "input", "last and slowest are numbers of requests.")
        question = {"slowest": slowest} if slowest else {"last": last}
        return [told for answer in await ask(question) for told in answer or []]

    async def tiered_stats() -> Any:
        """Return the state of the tiers, one element per scheduler."""
        manager = http_server._global_state.tokenizer_manager
        states = await manager.get_internal_state()
        return [state.get("tiered") for state in states]

    async def tiered_profile() -> Any:
        """Return what attention was summed up to since the sums began."""
        return (await ask_state(PROFILE_KEY, "tiered_profile"))[0]

    async def tiered_profile_begin(local: int = 64, on: bool = True) -> Any:
        """Sum the attention of prefills up, from nothing; or end that."""
        if not 0 <= local <= _MAX_NUMBER:
            raise refused(400, "input", "local is a number of tokens.")
        manager = http_server._global_state.tokenizer_manager
        number = local if on else -1
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={PROFILE_KNOB: number})
        )
        if not all(done):
            raise refused(
                409,
                "busy",
                "Requests are running, or GET /tiered/profile says why not; see the "
                "log.",
            )
        return {"on": on}

    async def tiered_drop(tier: str) -> Any:
        """Forget every page of one tier: device, host, cxl or disk."""
        if tier not in DROP_KNOBS:
            raise refused(
                400,
                "input",
                f"tier: {tier[:100]!r} is unknown; use {', '.join(DROP_KNOBS)}.",
            )
        manager = http_server._global_state.tokenizer_manager
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={DROP_KNOBS[tier]: 1})
        )
        if not all(done):
            raise refused(
                409,
                "busy",
                "Requests are running, or there is no such tier; see the log.",
            )
        return {"dropped": tier}

    async def tiered_faults(emulate: str = "") -> Any:
        """Switch delays and faults on, in place of the former; empty for none."""
        if not faults_allowed():
            raise refused(
                403, "faults_off", f"Faults are off: {FAULT_ENV}=1 is not set."
            )
        try:
            parse_emulation(emulate, EMULATED_TIERS, "emulate")
        except ConfigError as error:
            raise refused(400, "input", str(error)) from None
        manager = http_server._global_state.tokenizer_manager
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={FAULTS_KEY + emulate: 1})
        )
        if not all(done):
            raise refused(409, "busy", "Not switched; the server's log says why.")
        return {"emulated": emulate}

    async def tiered_load_policy(policy: str) -> Any:
        """Load by another policy from now on: auto, always or never."""
        if policy not in LOAD_POLICIES:
            raise refused(
                400,
                "input",
                f"policy: {policy[:100]!r} is unknown; use {', '.join(LOAD_POLICIES)}.",
            )
        manager = http_server._global_state.tokenizer_manager
        number = LOAD_POLICIES.index(policy)
        done = await manager.set_internal_state(
            SetInternalStateReq(server_args={LOAD_POLICY_KNOB: number})
        )
        if not all(done):
            raise refused(409, "busy", "Requests are running; try again when idle.")
        return {"load_policy": policy}

    # One place for all: none can be added without its guard and its level.
    for method, path, endpoint, level in (
        ("GET", "/tiered/explain/{rid:path}", tiered_explain, AuthLevel.ADMIN_OPTIONAL),
        ("GET", "/tiered/explain", tiered_explain_some, AuthLevel.ADMIN_OPTIONAL),
        ("GET", "/tiered/stats", tiered_stats, AuthLevel.NORMAL),
        ("GET", "/tiered/profile", tiered_profile, AuthLevel.ADMIN_OPTIONAL),
        ("POST", "/tiered/profile", tiered_profile_begin, AuthLevel.ADMIN_OPTIONAL),
        ("POST", "/tiered/drop", tiered_drop, AuthLevel.ADMIN_OPTIONAL),
        ("POST", "/tiered/faults", tiered_faults, AuthLevel.ADMIN_OPTIONAL),
        ("POST", "/tiered/load-policy", tiered_load_policy, AuthLevel.ADMIN_OPTIONAL),
    ):
        http_server.app.add_api_route(
            path,
            auth_level(level)(endpoint),
            methods=[method],
            dependencies=[Depends(refuse_foreign)],
        )


def _count_refusal(reason: str) -> None:
    """Count a refused call as ``sgl_tiered:http_refusals``, by its reason."""
    # Made here and not at import, see ``reporting``.
    global _REFUSALS
    if _REFUSALS is None:
        from prometheus_client import Counter

        _REFUSALS = Counter(
            "sgl_tiered:http_refusals", "Calls of /tiered/* refused.", ["reason"]
        )
    _REFUSALS.labels(reason).inc()


_REFUSALS: Any = None
