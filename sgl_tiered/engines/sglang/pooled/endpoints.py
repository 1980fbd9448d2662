"""Where a server of a pool can be reached by those who are not in it: by routers.

What stands in its entry in the registry beside the addresses of the pool itself:

    http        of its HTTP server, ``http://HOST:PORT``
    events      of its KV events, ``tcp://HOST:PORT``; the word none where it has none
    replay      where missed events can be asked for; only where it can be done
    topic       of the events, unless it is empty
    bootstrap   of a prefill server, the port that decode servers ask at

Entries without these words are those of older servers; whoever reads an entry passes
over words that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["endpoints_of"]

_WILDCARDS = ("*", "0.0.0.0", "::", "")


def endpoints_of(server_args: Any, pool_host: str) -> dict[str, str]:
    """Return the words above.

    Args:
        server_args: SGLang's.
        pool_host: on which the others of the pool reach this server; it stands for
            "all addresses" as well.
    """
    host = _seen(str(getattr(server_args, "host", "") or ""), pool_host)
    scheme = "https" if getattr(server_args, "ssl_certfile", None) else "http"
    port = getattr(server_args, "port", 0)
    found = {"http": f"{scheme}://{host}:{port}", **_events(server_args, host)}
    if getattr(server_args, "disaggregation_mode", "null") == "prefill":
        bootstrap = getattr(server_args, "disaggregation_bootstrap_port", None)
        if bootstrap is not None:
            found["bootstrap"] = str(bootstrap)
    return found


def _events(server_args: Any, host: str) -> dict[str, str]:
    """Read ``--kv-events-config``; what SGLang would not take it has refused itself."""
    try:
        told = json.loads(getattr(server_args, "kv_events_config", None) or "{}")
    except ValueError:
        told = {}
    if not isinstance(told, Mapping) or told.get("publisher") != "zmq":
        return {"events": "none"}
    events = _tcp(told.get("endpoint", "tcp://*:5557"), host, told.get("bind"))
    if events is None:
        # It connects to somebody, or is no TCP: nobody can subscribe from outside.
        return {"events": "none"}
    found = {"events": events}
    replay = _tcp(told.get("replay_endpoint"), host, True)
    if replay is not None:
        found["replay"] = replay
    if told.get("topic"):
        found["topic"] = str(told["topic"])
    return found


def _tcp(endpoint: Any, host: str, binds: bool | None) -> str | None:
    """Return a TCP address that SGLang binds, as a subscriber connects to it."""
    text = str(endpoint or "")
    name, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not port.isdigit():
        return None
    is_wild = name.strip("[]") in _WILDCARDS
    # SGLang takes any "::" for the wildcard, and binds it.
    if not is_wild and not binds and "::" not in name:
        return None
    return f"tcp://{host if is_wild else name}:{port}"


def _seen(host: str, pool_host: str) -> str:
    """Return a host as others write it, with brackets where they are needed."""
    found = pool_host if host in _WILDCARDS else host
    return f"[{found}]" if ":" in found else found
