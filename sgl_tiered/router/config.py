"""Settings of the router, checked once; and the words after ``--instance``."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.membership import check_name
from sgl_tiered.pool.registry_url import check_url
from sgl_tiered.router.feed import FeedSource
from sgl_tiered.transport.endpoints import tcp_endpoint

__all__ = [
    "COLOCATED",
    "DECODE",
    "KINDS",
    "PREFILL",
    "InstanceConfig",
    "RouterConfig",
    "Timeouts",
    "host_of",
    "is_loopback",
    "parse_instance",
]

PREFILL = "prefill"
DECODE = "decode"
COLOCATED = "colocated"
KINDS = (PREFILL, DECODE, COLOCATED)
AUTO = "auto"
DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's ``--disaggregation-bootstrap-port``."""
_MAX_DIGITS = 5
_MAX_PORT = 65_535
_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,128}")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One server behind the router.

    Attributes:
        name: what headers, metrics and the state call it; ``HOST:PORT`` by default.
        url: ``http://HOST:PORT``, without a path.
        kind: one of ``KINDS``.
        discovers_events: whether the server is asked where its events are.
        sources: where its events come from, one per data-parallel rank.
        bootstrap_port: of a prefill instance.
    """

    name: str
    url: str
    kind: str = COLOCATED
    discovers_events: bool = True
    sources: tuple[FeedSource, ...] = ()
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT

    @property
    def host(self) -> str:
        """The host of its address, as a peer connects to it."""
        return host_of(self.url)


def _check_seconds(name: str, seconds: float) -> None:
    _check_finite(name, seconds)
    if not seconds > 0:
        raise ConfigError(
            name, f"{seconds} s is no time to wait", "give seconds above 0"
        )


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(name, f"{value} is no amount", "give a number")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds in seconds.

    Attributes:
        connect_s: to connect to an instance.
        header_s: from connecting, or from the first byte after an answer, until a
            client's headers are whole.
        body_s: from there until its body is whole.
        keepalive_s: that a client's connection may be idle between requests.
        read_s: to find out what a body says.
        first_byte_s: from sending a request to the first byte of its answer's body; a
            queue and a prefill fit into it.
        idle_s: between two pieces of an answer, from an instance or to a client.
        whole_s: of an answer that is not streamed.
    """

    header_s: float = 20.0
    body_s: float = 120.0
    keepalive_s: float = 75.0
    read_s: float = 10.0
    connect_s: float = 3.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    whole_s: float = 3600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            # The flag is the name with what it is: --idle-timeout.
            name = each.name.removesuffix("_s").replace("_", "-")
            _check_seconds(f"--{name}-timeout", getattr(self, each.name))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything that the command line decides.

    Attributes:
        host: address to listen on.
        port: to listen on; 0 for a free one.
        api_key: that clients must bring; None for an open router.
        admin_api_key: that operators must bring, to change the fleet or to look at it;
            None for nobody where clients have a key, else for anybody.
        allow_hosts: that may be added while it serves: HOST, HOST:PORT, or networks.
        instance_api_key: that the instances want; None to pass the client's on, unless
            the router has a key of its own.
        policy: a word of ``policies.routing.registry.ROUTINGS``.
        credits: of the prompt tree, by place.
        running_cost_tokens: what a request under way counts, in prompt tokens.
        compute_cost: what a token to be computed counts, in tokens that wait.
        ttl_s: how long a prefix that was sent is assumed to be held where no event says
            so, in seconds.
        page_tokens: of instances that have sent no event yet.
        page_characters: in one page of the tree of texts.
        max_attempts: instances that are tried for one request at most.
        load_interval_s: between two questions for an instance's load (``/v1/loads``,
            which is cheap), or for the health of one that is down.
        health_interval_s: between two probes of its health (``/health``, which makes an
            idle server compute one token).
        health_timeout_s: of either.
        max_failures: probes that fail in a row until an instance is down.
        max_held_bytes: of the bodies of all requests under way.
        max_connections: of clients, open at one time; None for half of the files that
            the process may open.
        num_readers: bodies that are tokenized at one time, each by a process.
        tokenizer: a word for ``tokenizers.make_tokenizer``.
        template_keys: that chats may hand to their template, besides the usual ones.
        show_cached_tokens: whether clients without a salt are told how much of their
            prompt was cached.
        max_body_bytes: of a request, and of an answer that is not streamed.
        timeouts: of requests.
        registry: URL of a pool's registry, whose members are instances as well; None
            for none.
        name: of this router among its replicas; empty for one of machine and port.
        lease_s: from one renewal of its lease there to the end, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 30080
    api_key: str | None = None
    admin_api_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    instance_api_key: str | None = None
    policy: str = "prompt-tree"
    credits: Mapping[str, float] = field(default_factory=dict)
    running_cost_tokens: float = 64.0
    compute_cost: float = 2.0
    ttl_s: float = 300.0
    page_tokens: int = 16
    page_characters: int = 64
    max_attempts: int = 3
    load_interval_s: float = 1.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 5.0
    max_failures: int = 2
    max_body_bytes: int = 64 * 2**20
    max_held_bytes: int = 2 * 2**30
    max_connections: int | None = None
    num_readers: int = 2
    tokenizer: str = "none"
    template_keys: tuple[str, ...] = ()
    show_cached_tokens: bool = False
    timeouts: Timeouts = Timeouts()
    registry: str | None = None
    name: str = ""
    lease_s: float = 3.0

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ConfigError("--api-key-file", "the key is empty", "write one in it")
        if self.admin_api_key == "":
            raise ConfigError(
                "--admin-api-key-file", "the key is empty", "write one in it"
            )
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            raise ConfigError(
                "--admin-api-key-file", "it is the clients' key", "write another one"
            )
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                "--host",
                f"{self.host} can be reached from outside, and there is no key",
                "give --api-key-file, or listen on 127.0.0.1",
            )
        if self.name:
            try:
                check_name(self.name)
            except ConfigError as error:
                raise ConfigError("--name", error.problem, error.remedy) from None
        if self.registry is not None:
            try:
                check_url(self.registry)
            except ConfigError as error:
                raise ConfigError("--registry", error.problem, error.remedy) from None
        for name, value, least in (
            ("--max-attempts", self.max_attempts, 1),
            ("--page-tokens", self.page_tokens, 1),
            ("--page-characters", self.page_characters, 1),
            ("--ttl", self.ttl_s, 0),
            ("--running-cost", self.running_cost_tokens, 0),
            ("--compute-cost", self.compute_cost, 1),
            ("--readers", self.num_readers, 1),
            ("--max-body-mb", self.max_body_bytes, 1),
            ("--max-held-mb", self.max_held_bytes, self.max_body_bytes),
            (
                "--max-connections",
                1 if self.max_connections is None else self.max_connections,
                1,
            ),
        ):
            if value < least:
                raise ConfigError(name, f"{value} is too small", f"use {least} or more")
            _check_finite(name, value)
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(
                "--port", f"{self.port} is none", f"give 0 (any) to {_MAX_PORT}"
            )
        for name, seconds in (
            ("--load-interval", self.load_interval_s),
            ("--health-interval", self.health_interval_s),
            ("--health-timeout", self.health_timeout_s),
            ("lease", self.lease_s),
        ):
            _check_seconds(name, seconds)


def host_of(url: str) -> str:
    """Return the host of an address; an empty text where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # half an IPv6 address, or letters that stand for others
        return ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    A name other than ``localhost`` counts as reachable, whatever it resolves to now.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_instance(text: str, setting: str = "--instance") -> InstanceConfig:
    """Read ``URL[,kind=K][,name=N][,events=E][,replay=R][,topic=T][,bootstrap=PORT]``.

    ``events`` is ``auto`` (the default: ask the server), ``none``, or ``tcp://HOST:PORT``;
    given again, it is the next data-parallel rank's, and ``replay`` follows its events.

    Raises:
        ConfigError: a part is wrong; says which.
    """
    url, *parts = [part.strip() for part in text.split(",")]
    try:
        split = urlsplit(url)
        is_address = split.scheme in ("http", "https") and bool(split.hostname)
        is_address = is_address and split.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        is_address = False
    if not is_address:
        raise ConfigError(
            setting, f"{url[:200]!r} is no address", "write http://HOST:PORT"
        )
    if split.path.strip("/") or split.query or split.username:
        raise ConfigError(
            setting, f"{url!r} has more than host and port", "write http://HOST:PORT"
        )
    fields: dict[str, str] = {}
    events: list[tuple[str, str | None]] = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(
                setting, f"{part!r} is no KEY=VALUE", "write kind=prefill"
            )
        if key == "events":
            events.append((value, None))
        elif key == "replay":
            if not events:
                raise ConfigError(setting, "replay stands alone", "write events= first")
            events[-1] = (events[-1][0], _endpoint(value, setting))
        elif key in ("kind", "name", "topic", "bootstrap") and key not in fields:
            fields[key] = value
        else:
            raise ConfigError(
                setting,
                f"{key!r} is not known, or was said before",
                "use kind, name, events, replay, topic, bootstrap",
            )
    kind = fields.get("kind", COLOCATED)
    if kind not in KINDS:
        raise ConfigError(setting, f"kind {kind!r}", f"use {', '.join(KINDS)}")
    name = fields.get("name", split.netloc)
    if not _NAME.fullmatch(name):
        raise ConfigError(setting, f"name {name!r}", "use letters, digits and . _ : -")
    port = fields.get("bootstrap", str(DEFAULT_BOOTSTRAP_PORT))
    # By length first: Python reads no number of thousands of digits.
    is_port = port.isascii() and port.isdigit() and len(port) <= _MAX_DIGITS
    if not is_port or not 0 < int(port) < 65536:
        raise ConfigError(setting, f"bootstrap {port[:200]!r}", "use a port")
    words = [value for value, _ in events]
    topic = fields.get("topic", "")
    if words in ([], [AUTO]) or words == ["none"]:
        sources: tuple[FeedSource, ...] = ()
    else:
        sources = tuple(
            FeedSource(_endpoint(value, setting), replay, topic)
            for value, replay in events
        )
    return InstanceConfig(
        name,
        f"{split.scheme}://{split.netloc}",
        kind,
        words in ([], [AUTO]),
        sources,
        int(port),
    )


def _endpoint(value: str, setting: str) -> str:
    """Check an address that a subscriber connects to."""
    if re.fullmatch(r"ipc://.+", value):
        return value
    if re.fullmatch(r"tcp://(\*|0\.0\.0\.0|\[::\]):\d+", value):
        raise ConfigError(
            setting,
            f"{value} is what the server binds, not what a subscriber connects to",
            "write the server's host, e.g. tcp://127.0.0.1:5557",
        )
    try:
        tcp_endpoint(value)
    except ValueError as error:
        raise ConfigError(setting, str(error), "write tcp://HOST:PORT") from None
    return value
