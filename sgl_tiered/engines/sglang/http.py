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
from sgl_tiered.serving.emulation import parse_emulation

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
    from sgl_tiered.serving.options import BACKEND_NAME

    if server_args.radix_cache_backend != BACKEND_NAME:
        return
    from fastapi import Depends
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    guard = _origin_guard(bool(server_args.api_key or server_args.admin_api_key))
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
            dependencies=[Depends(guard)],
        )


def _origin_guard(has_key: bool) -> Any:
    """Return what refuses a browser's call for a page of another origin."""
    from fastapi import Header, Request

    async def refuse_foreign(
        request: Any, origin: str | None = Header(None), host: str = Header("")
    ) -> None:
        local = None if has_key else (request.scope.get("server") or [None])[0]
        if is_foreign(origin, host, local):
            raise _refused(
                403,
                "origin",
                f"A page of {str(origin)[:100]!r} may not call this server; call it "
                "without a browser.",
            )

    # FastAPI looks for names of types in the module, which does without FastAPI.
    refuse_foreign.__annotations__["request"] = Request
    return refuse_foreign


async def tiered_explain(rid: str) -> Any:
    """Return what became of one request."""
    found = [told for told in await _explained({"rid": rid}) if told is not None]
    if not found:
        raise _refused(
            404,
            "unknown",
            f"{rid[:100]!r} is not known: it is not here, or ended too long ago "
            "(--tiered-explain-last).",
        )
    return found[0]


async def tiered_explain_some(last: int = 20, slowest: int = 0) -> Any:
    """Return what became of the last requests, or of the slowest of those kept."""
    if not 0 <= min(last, slowest) <= max(last, slowest) <= _MAX_NUMBER:
        raise _refused(400, "input", "last and slowest are numbers of requests.")
    question = {"slowest": slowest} if slowest else {"last": last}
    return [told for answer in await _explained(question) for told in answer or []]


async def tiered_stats() -> Any:
    """Return the state of the tiers, one element per scheduler."""
    states = await _manager().get_internal_state()
    return [state.get("tiered") for state in states]


async def tiered_profile() -> Any:
    """Return what attention was summed up to since the sums began."""
    return (await _states(PROFILE_KEY, "tiered_profile"))[0]


async def tiered_profile_begin(local: int = 64, on: bool = True) -> Any:
    """Sum the attention of prefills up, from nothing; or end that."""
    if not 0 <= local <= _MAX_NUMBER:
        raise _refused(400, "input", "local is a number of tokens.")
    if not await _set(PROFILE_KNOB, local if on else -1):
        raise _refused(
            409,
            "busy",
            "Requests are running, or GET /tiered/profile says why not; see the log.",
        )
    return {"on": on}


async def tiered_drop(tier: str) -> Any:
    """Forget every page of one tier: device, host, cxl or disk."""
    if tier not in DROP_KNOBS:
        raise _refused(
            400,
            "input",
            f"tier: {tier[:100]!r} is unknown; use {', '.join(DROP_KNOBS)}.",
        )
    if not await _set(DROP_KNOBS[tier], 1):
        raise _refused(
            409, "busy", "Requests are running, or there is no such tier; see the log."
        )
    return {"dropped": tier}


async def tiered_faults(emulate: str = "") -> Any:
    """Switch delays and faults on, in place of the former; empty for none."""
    from sgl_tiered.serving.option_reader import FAULT_ENV, faults_allowed
    from sgl_tiered.serving.options import EMULATED_TIERS

    if not faults_allowed():
        raise _refused(403, "faults_off", f"Faults are off: {FAULT_ENV}=1 is not set.")
    try:
        parse_emulation(emulate, EMULATED_TIERS, "emulate")
    except ConfigError as error:
        raise _refused(400, "input", str(error)) from None
    if not await _set(FAULTS_KEY + emulate, 1):
        raise _refused(409, "busy", "Not switched; the server's log says why.")
    return {"emulated": emulate}


async def tiered_load_policy(policy: str) -> Any:
    """Load by another policy from now on: auto, always or never."""
    if policy not in LOAD_POLICIES:
        raise _refused(
            400,
            "input",
            f"policy: {policy[:100]!r} is unknown; use {', '.join(LOAD_POLICIES)}.",
        )
    if not await _set(LOAD_POLICY_KNOB, LOAD_POLICIES.index(policy)):
        raise _refused(409, "busy", "Requests are running; try again when idle.")
    return {"load_policy": policy}


def _manager() -> Any:
    """Return SGLang's token manager, which asks the schedulers."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


async def _states(rid: str, name: str) -> list[Any]:
    """Ask every scheduler; SGLang's question for the state carries ours as rid."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = _manager()
    manager.auto_create_handle_loop()
    request = GetInternalStateReq(rid=rid)
    answers = await manager.get_internal_state_communicator(request)
    return [answer.internal_state.get(name) for answer in answers]


async def _explained(question: dict[str, Any]) -> list[Any]:
    return await _states(EXPLAIN_KEY + json.dumps(question), "tiered_explain")


async def _set(knob: str, number: int) -> bool:
    """Set a number at every scheduler; return whether all took it."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    request = SetInternalStateReq(server_args={knob: number})
    return all(await _manager().set_internal_state(request))


def _refused(status: int, reason: str, sentence: str) -> Exception:
    """Count a refusal, and return what to raise."""
    from fastapi import HTTPException

    _count_refusal(reason)
    return HTTPException(status, sentence)


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
