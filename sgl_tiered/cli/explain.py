"""``sgl-tiered explain``: why a request waited, and why its prefix was no hit."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_tiered.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["register"]

_TIMEOUT_S = 30.0
_NOT_FOUND = 404


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "explain",
        help="say why requests of a running server waited and what became of them",
        description="The id is what the client saw: meta_info.id of /generate, or the "
        "id of an OpenAI answer.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("rid", nargs="?", help="id of a request")
    which.add_argument("--last", type=int, metavar="N", help="the last N that ended")
    which.add_argument(
        "--slowest", type=int, metavar="N", help="the N slowest to their first token"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="default %(default)s"
    )
    parser.add_argument(
        "--api-key", help="the server's --admin-api-key, if it has one, else --api-key"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code, 1 for an unknown request."""
    if arguments.rid is not None:
        path = "/tiered/explain/" + urllib.parse.quote(arguments.rid, safe="")
    elif arguments.last is not None:
        path = f"/tiered/explain?last={arguments.last}"
    else:
        path = f"/tiered/explain?slowest={arguments.slowest}"
    told = fetch(arguments.url, path, arguments.api_key)
    if told is None:
        print(
            f"sgl-tiered: the server does not know {arguments.rid!r}: it is not there, "
            "or ended too long ago (--tiered-explain-last).",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        print(json.dumps(told))
    elif isinstance(told, list):
        show([overview(told)])
    else:
        show([overview([told]), *details(told)])
    return 0


def show(tables: Sequence[Table]) -> None:
    """Print tables, wide where they go into a file, so that no cell is cut."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    # What a client named its request is text, whatever brackets are in it.
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for table in tables:
        console.print(table)


def fetch(url: str, path: str, api_key: str | None) -> Any:
    """Ask a server; None for a request that it does not know.

    Raises:
        ConfigError: no server answers, it is not a tiered one, or it wants a key.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("--url", f"{url!r} is no address", "write http://HOST:PORT")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    # No proxy stands between us and a server that is named by its address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == _NOT_FOUND and "is not known" in error.read().decode(
            errors="replace"
        ):
            return None
        raise ConfigError(
            "--url",
            f"{path} answers {error.code}",
            "start the server with --radix-cache-backend tiered, and give its "
            "--api-key if it has one",
        ) from None
    except ValueError:
        raise ConfigError("--url", f"{path} is no JSON", "check the address") from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise ConfigError(
            "--url",
            f"no server answers at {url} ({reason})",
            "give the address of a running server",
        ) from None


def overview(told: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a line per request."""
    table = _table("Requests")
    for name in ("id", "state", "prompt", "from", "TTFT s", "predicted s"):
        table.add_column(name, overflow="fold")
    table.add_column("waited s, for", overflow="fold")
    table.add_column("first miss", overflow="fold")
    for one in told:
        missing = one.get("missing", [])
        table.add_row(
            one["rid"],
            one["state"],
            str(one["prompt_tokens"]),
            _pairs(one.get("tokens", {}), "{name} {value}"),
            _seconds(one["ttft"]["real_s"]),
            _seconds(one["ttft"]["predicted_s"]),
            _pairs(one["wait"]["by_reason_s"], "{name} {value:.3f}"),
            missing[0]["text"] if missing else "",
        )
    return table


def details(one: dict[str, Any]) -> list[Table]:
    """Return tables of what there is to say of one request besides."""
    tables = []
    if one.get("missing"):
        table = _table("Why these tokens were no hit")
        for name in ("from token", "tokens", "cause", "what is known"):
            table.add_column(name, overflow="fold")
        for span in one["missing"]:
            numbers = (str(span["first_token"]), str(span["tokens"]))
            table.add_row(*numbers, span["cause"], span["text"])
        tables.append(table)
    if one.get("edges"):
        table = _table("What was moved for it")
        for name in ("edge", "bytes", "seconds, shared with its batch"):
            table.add_column(name)
        for name, edge in one["edges"].items():
            table.add_row(name, str(edge["bytes"]), f"{edge['s']:.6f}")
        tables.append(table)
    decision = one.get("decision")
    if decision and "reason" in decision:
        table = _table("What was decided about its pages")
        table.add_column("what")
        table.add_column("value", overflow="fold")
        table.add_row("reason", decision["reason"])
        for name, value in decision["predicted"].items():
            table.add_row(f"predicted {name}", f"{value:.6f}")
        for number, replan in enumerate(decision["replans"], 1):
            table.add_row(f"change {number}", replan)
        if "activations" in one:
            table.add_row("no activations", one["activations"]["refused"])
        tables.append(table)
    return tables


def _table(title: str) -> Table:
    """Return an empty table; the base installation has no package for them.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from rich.table import Table
    except ImportError:
        raise ConfigError(
            "explain", "its tables need the package rich", "install it, or give --json"
        ) from None
    return Table(title=title)


def _pairs(values: dict[str, Any], form: str) -> str:
    return ", ".join(form.format(name=n, value=v) for n, v in values.items())


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
