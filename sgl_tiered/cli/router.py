"""``sgl-tiered router``: one address in front of many servers, each request where its
prefix is."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.registry import ROUTINGS

__all__ = ["register"]


_EPILOG = """\
an instance is URL with any of
  kind=prefill|decode|colocated   with prefill and decode, requests go to pairs
  name=NAME                       in headers and metrics; default HOST:PORT
  events=auto|none|tcp://HOST:PORT   where its KV events are; auto asks the server
  replay=tcp://HOST:PORT, topic=TOPIC   of the events before
  bootstrap=PORT                  of a prefill instance; default 8998
"""


_TIMES = (
    ("--header-timeout", 20.0, "until a client's headers are whole"),
    ("--body-timeout", 120.0, "from there until its body is whole"),
    ("--keepalive-timeout", 75.0, "of a client's connection between requests"),
    (
        "--read-timeout",
        10.0,
        "to tokenize a prompt, else it is compared by characters; or to parse a long "
        "body, else it is refused",
    ),
    ("--connect-timeout", 3.0, "to connect"),
    (
        "--first-byte-timeout",
        600.0,
        "to the first byte of a streamed answer: queue and prefill",
    ),
    (
        "--idle-timeout",
        120.0,
        "between two pieces of an answer, from a server or to a client",
    ),
    ("--whole-timeout", 3600.0, "of an answer that is not streamed"),
    ("--load-interval", 1.0, "between two questions for a server's load"),
    ("--health-interval", 10.0, "between two probes of its health"),
    ("--health-timeout", 5.0, "of either of them"),
)
"""Flag, seconds if it is not given, what for."""
_MAX_KEY_CHARACTERS = 4096


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "router",
        help="serve one address in front of many SGLang servers, by who holds the "
        "prefix",
        description="One address in front of many SGLang servers: a request goes where "
        "its prefix is,\nunless waiting there costs more. Needs the packages that "
        "SGLang brings, or\nsgl-tiered[router].",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    _add_servers(parser.add_argument_group("who serves (both, or either)"))
    _add_address_and_keys(parser.add_argument_group("where it listens, and keys"))
    _add_choice(parser.add_argument_group("how it chooses"))
    _add_bounds(parser.add_argument_group("bounds, in seconds where not said"))
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )
    parser.set_defaults(run=run)


def _add_servers(group: Any) -> None:
    add = group.add_argument
    add(
        "--instance",
        action="append",
        default=[],
        metavar="URL[,KEY=VALUE...]",
        help="a server, see below; may be given many times",
    )
    add(
        "--registry",
        metavar="URL",
        help="the registry of a pool (what the servers have as --tiered-pool: local, "
        "file:PATH, etcd://HOST:PORT[,HOST:PORT]/POOL): its servers are added as they "
        "come, drained with sgl-tiered pool drain, and removed when their lease ends; "
        "replicas of the router with one registry follow each other's changes",
    )
    add(
        "--name",
        default="",
        help="of this replica in the registry; default one made of the machine's name "
        "and --port",
    )


def _add_address_and_keys(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default %(default)s")
    add("--port", type=int, default=30080, help="0 for a free one; %(default)s")
    add("--api-key-file", type=Path, help="file with the key that clients must bring")
    add(
        "--admin-api-key-file",
        type=Path,
        help="file with the key for /router/*: to change the fleet or to look at it; "
        "where clients have a key and there is none of these, nobody may",
    )
    add("--instance-api-key-file", type=Path, help="file with the servers' own key")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST[:PORT]|NETWORK",
        help="whose servers may be added by POST /router/instances, besides the hosts "
        "of --instance and of the registry, and besides this machine where the servers "
        "have no key; may be given many times",
    )
    add(
        "--show-cached-tokens",
        action="store_true",
        help="tell every client in X-Tiered-Cached-Tokens how much of its prompt was "
        "cached, which is what others have asked before; else only those who send a "
        "cache_salt",
    )


def _add_choice(group: Any) -> None:
    add = group.add_argument
    add("--policy", choices=ROUTINGS, default="prompt-tree", help="%(default)s")
    add(
        "--tokenizer",
        default="none",
        help="the servers' tokenizer (folder or name), python:MODULE:FUNCTION, or "
        "none: then texts are compared by characters, and the servers' events, which "
        "speak in tokens, say nothing of them (default)",
    )
    add(
        "--readers",
        type=int,
        default=2,
        help="bodies that are tokenized at one time, each by a process; %(default)s",
    )
    add(
        "--chat-template-key",
        action="append",
        default=[],
        metavar="NAME",
        help="that chats may have in chat_template_kwargs besides the usual ones; "
        "chats with others are compared by characters; may be given many times",
    )
    add(
        "--credits",
        default="",
        metavar="PLACE=SHARE,...",
        help="share of a token's prefill that a cached token saves, by place, e.g. "
        "device=1,host=0.9",
    )
    add(
        "--running-cost",
        type=float,
        default=64.0,
        metavar="TOKENS",
        help="what a request under way counts in the load; %(default)s",
    )
    add(
        "--compute-cost",
        type=float,
        default=2.0,
        metavar="X",
        help="what a token to be computed counts, in tokens that wait: for the request "
        "itself and for those who come after it; %(default)s",
    )
    add(
        "--ttl",
        type=float,
        default=300.0,
        metavar="S",
        help="how long a prefix that was sent is assumed to be held where no event "
        "says otherwise; %(default)s",
    )
    add(
        "--page-tokens",
        type=int,
        default=16,
        help="in a page of a server, until its events tell; %(default)s",
    )
    add(
        "--page-characters",
        type=int,
        default=64,
        help="in a page of texts, without a tokenizer; %(default)s",
    )


def _add_bounds(group: Any) -> None:
    add = group.add_argument
    add(
        "--max-attempts", type=int, default=3, help="instances per request; %(default)s"
    )
    add(
        "--max-connections",
        type=int,
        help="of clients, open at one time; default half of the open files allowed, "
        "16384 at most",
    )
    for flag, default_s, what in _TIMES:
        add(
            flag,
            type=float,
            default=default_s,
            metavar="S",
            help=f"{what}; %(default)s",
        )
    add("--max-body-mb", type=int, default=64, help="of a request; %(default)s")
    add(
        "--max-held-mb",
        type=int,
        default=2048,
        help="of the bodies of all requests under way; %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand until it is interrupted; returns the exit code."""
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # It tells every single request to etcd.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        # Only here: the other commands must work without these packages.
        from sgl_tiered.router.config import RouterConfig, Timeouts, parse_instance
        from sgl_tiered.router.front import Router
    except ImportError as error:
        raise ConfigError(
            "router", f"a package is missing ({error})", "install sgl-tiered[router]"
        ) from error
    config = RouterConfig(
        host=arguments.host,
        port=arguments.port,
        api_key=_key(arguments.api_key_file, "--api-key-file"),
        admin_api_key=_key(arguments.admin_api_key_file, "--admin-api-key-file"),
        allow_hosts=tuple(arguments.allow_host),
        instance_api_key=_key(
            arguments.instance_api_key_file, "--instance-api-key-file"
        ),
        policy=arguments.policy,
        credits=parse_credits(arguments.credits),
        running_cost_tokens=arguments.running_cost,
        compute_cost=arguments.compute_cost,
        ttl_s=arguments.ttl,
        page_tokens=arguments.page_tokens,
        page_characters=arguments.page_characters,
        max_attempts=arguments.max_attempts,
        load_interval_s=arguments.load_interval,
        health_interval_s=arguments.health_interval,
        health_timeout_s=arguments.health_timeout,
        max_body_bytes=arguments.max_body_mb * 2**20,
        max_held_bytes=arguments.max_held_mb * 2**20,
        max_connections=arguments.max_connections,
        num_readers=arguments.readers,
        tokenizer=arguments.tokenizer,
        template_keys=tuple(arguments.chat_template_key),
        show_cached_tokens=arguments.show_cached_tokens,
        timeouts=Timeouts(
            header_s=arguments.header_timeout,
            body_s=arguments.body_timeout,
            keepalive_s=arguments.keepalive_timeout,
            read_s=arguments.read_timeout,
            connect_s=arguments.connect_timeout,
            first_byte_s=arguments.first_byte_timeout,
            idle_s=arguments.idle_timeout,
            whole_s=arguments.whole_timeout,
        ),
        registry=arguments.registry,
        name=arguments.name,
    )
    instances = [parse_instance(text) for text in arguments.instance]
    _raise_file_limit()
    router = Router(config, instances)
    asyncio.run(_serve(router, arguments.host, arguments.tokenizer == "none"))
    return 0


def _raise_file_limit() -> None:
    """Let the process open as many files as it may: every connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(router: Any, host: str, has_characters: bool) -> None:
    """Serve until SIGINT or SIGTERM."""
    try:
        await router.start()
    except OSError as error:
        raise ConfigError("--port", str(error), "choose another one") from error
    print(f"sgl-tiered router: http://{host}:{router.port}", flush=True)
    if has_characters:
        print(
            "sgl-tiered router: no tokenizer: texts are compared by characters, and "
            "evictions of them are not known; token ids and KV events go together.",
            flush=True,
        )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await router.warm()
        await stopped.wait()
    finally:
        await router.close()


def parse_credits(text: str) -> dict[str, float]:
    """Read ``PLACE=SHARE,...``; an empty text is no credit at all.

    Raises:
        ConfigError: a part is no such pair. Places are checked by the policy.
    """
    found = {}
    for part in _parts(text):
        place, _, share = part.partition("=")
        try:
            found[place] = float(share)
        except ValueError as error:
            raise ConfigError(
                "--credits", f"{part!r} is no PLACE=SHARE", "write device=1,host=0.9"
            ) from error
    return found


def _parts(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _key(path: Path | None, setting: str) -> str | None:
    """Return the key in a file, without the line's end.

    Raises:
        ConfigError: it cannot be read, is empty, or others may read it.
    """
    if path is None:
        return None
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(_MAX_KEY_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(setting, str(error), "name a readable file") from error
    if mode & 0o077:
        raise ConfigError(
            setting,
            f"mode {mode:04o} of {path} lets others read the key",
            f"chmod 600 {path}, and take another key if others could read it",
        )
    if not key:
        raise ConfigError(setting, f"{path} is empty", "write the key into it")
    return key
