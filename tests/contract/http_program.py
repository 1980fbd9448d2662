"""Prints, as JSON, how the endpoints of the HTTP process answer to keys and origins.

The routes are the plugin's, the keys are judged by SGLang's own code; only what stands
behind the routes, its token manager, is a stand-in.
"""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
CLIENT, ADMIN = "client-key", "admin-key"
FLAGS = {
    "none": (None, None),
    "api": (CLIENT, None),
    "admin": (None, ADMIN),
    "both": (CLIENT, ADMIN),
}
KEYS = {"none": None, "wrong": "wrong-key", "client": CLIENT, "admin": ADMIN}
CALLS = {
    "/tiered/explain": "GET /tiered/explain?last=1",
    "/tiered/explain/{rid:path}": "GET /tiered/explain/some",
    "/tiered/stats": "GET /tiered/stats",
    "/tiered/profile": "GET /tiered/profile",
    "/tiered/profile POST": "POST /tiered/profile?local=1",
    "/tiered/drop": "POST /tiered/drop?tier=host",
    "/tiered/faults": "POST /tiered/faults?emulate=",
    "/tiered/load-policy": "POST /tiered/load-policy?policy=auto",
    "/flush_cache": "POST /flush_cache",
}
ODD = {
    "tier": "POST /tiered/drop?tier=moon",
    "policy": "POST /tiered/load-policy?policy=moon",
    "emulate": "POST /tiered/faults?emulate=moon",
    "negative local": "POST /tiered/profile?local=-1",
    "huge local": f"POST /tiered/profile?local={10**30}",
    "negative last": "GET /tiered/explain?last=-1",
    "huge last": f"GET /tiered/explain?last={10**30}",
    "nobody": "GET /tiered/explain/nobody",
}
ORIGINS = {
    "none": None,
    "same": "http://here:30000",
    "other port": "http://here:3000",
    "other site": "https://elsewhere.example",
    "null": "null",
    "broken": "http://[",
}


class Manager:
    """Stands in for SGLang's token manager; notes what reached it."""

    def __init__(self) -> None:
        self.reached: list[Any] = []

    def auto_create_handle_loop(self) -> None:
        """Nothing to start."""

    async def get_internal_state_communicator(self, request: Any) -> Any:
        self.reached.append(request.rid)
        told = {"tiered_profile": {}, "tiered_explain": []}
        if '"some"' in request.rid:
            told["tiered_explain"] = {"rid": "some"}
        if '"nobody"' in request.rid:
            told["tiered_explain"] = None
        return [SimpleNamespace(internal_state=told)]

    async def get_internal_state(self) -> Any:
        return [{"tiered": {}}]

    async def set_internal_state(self, request: Any) -> Any:
        self.reached.append(request.server_args)
        return [True]

    async def flush_cache(self, timeout_s: float) -> Any:
        self.reached.append("flush")
        return SimpleNamespace(success=True)


def served(api_key: str | None, admin_api_key: str | None) -> tuple[Any, Manager]:
    """Return a client of an app with our routes and SGLang's guard, and its manager."""
    from fastapi import FastAPI
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import add_api_key_middleware
    from starlette.testclient import TestClient

    from sgl_tiered.engines.sglang import http

    manager = Manager()
    http_server._global_state = SimpleNamespace(tokenizer_manager=manager)
    app = FastAPI()
    app.add_api_route("/flush_cache", http_server.flush_cache, methods=["POST"])
    http_server.app = app
    http._add_endpoints(
        SimpleNamespace(
            radix_cache_backend="tiered", api_key=api_key, admin_api_key=admin_api_key
        )
    )
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    return TestClient(app, base_url="http://here:30000"), manager


def main() -> None:
    """Print everything."""
    from prometheus_client import REGISTRY

    matrix: dict[str, dict[str, dict[str, int]]] = {}
    for flags, keys in FLAGS.items():
        client, _ = served(*keys)
        for name, call in CALLS.items():
            row = matrix.setdefault(name, {}).setdefault(flags, {})
            for word, key in KEYS.items():
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                answer = client.request(*call.split(" "), headers=headers)
                row[word] = answer.status_code

    client, manager = served(None, None)
    origins: dict[str, dict[str, list[Any]]] = {}
    for name, call in CALLS.items():
        for word, origin in ORIGINS.items():
            before = len(manager.reached)
            headers = {} if origin is None else {"Origin": origin}
            answer = client.request(*call.split(" "), headers=headers)
            is_reached = len(manager.reached) > before
            row = origins.setdefault(name, {})
            row[word] = [answer.status_code, is_reached, answer.text[:300]]

    rebound = {}
    for flags, keys in FLAGS.items():
        page, _ = served(*keys)
        page.base_url = "http://127.0.0.1:30000"
        headers = {"Host": "a.page:30000", "Origin": "http://a.page:30000"}
        headers["Authorization"] = f"Bearer {keys[1] or keys[0]}"
        rebound[flags] = {
            name: page.request(*call.split(" "), headers=headers).status_code
            for name, call in CALLS.items()
        }

    manager.reached.clear()
    odd = {}
    for word, call in ODD.items():
        answer = client.request(*call.split(" "))
        odd[word] = [answer.status_code, answer.json().get("detail", "")]
    sent = [each for each in manager.reached if isinstance(each, dict)]

    def counted(reason: str) -> float:
        labels = {"reason": reason}
        return REGISTRY.get_sample_value("sgl_tiered:http_refusals_total", labels) or 0

    paths = sorted({route.path for route in client.app.routes})
    told = {
        "matrix": matrix,
        "origins": origins,
        "rebound": rebound,
        "odd": odd,
        "sent": sent,
        "paths": [path for path in paths if path.startswith("/tiered")],
        "counted": {word: counted(word) for word in ("origin", "input", "unknown")},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
