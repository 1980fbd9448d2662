"""The router's header on its way to the scheduler, and shapes of pages that servers
compare; with stand-ins for SGLang's objects."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.core.ids import Encoding, TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.pooled.hints import add_hints, hints_of, parse_holders
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.peers import Hint
from sgl_tiered.serving.attribution import cached_by_tier
from sgl_tiered.serving.pool_shape import pool_shape

HEADER = "X-Tiered-Holders"
GOOD = "a=http://127.0.0.1:3000/;tokens=512;tier=host, b=;tokens=16"
HINTS = (Hint("a", "http://127.0.0.1:3000", 512), Hint("b", "", 16))


@dataclass
class Action:
    """SGLang's action of an envelope."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@dataclass
class Envelope:
    """SGLang's envelope of hints."""

    protocol_version: str
    message_id: str
    actions: list[Action] = field(default_factory=list)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A tokenizer manager; SGLang's module is a stand-in."""

    def decode(value: Any) -> Envelope:
        if not isinstance(value, Envelope):
            raise ValueError("no envelope")
        return value

    module = ModuleType("sglang.srt.managers.kv_hints")
    vars(module).update(
        KvHintAction=Action, KvHintsEnvelope=Envelope, decode_kv_hints_envelope=decode
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.kv_hints", module)
    return SimpleNamespace()


def request(header: str | None) -> SimpleNamespace:
    return SimpleNamespace(headers={} if header is None else {HEADER: header})


@pytest.mark.parametrize(
    ("header", "hints"),
    [
        (GOOD, HINTS),
        ("a=u;tokens=512", (Hint("a", "u", 512),)),
        ("a=u;tokens=512;tier=disk", (Hint("a", "u", 512, on_disk=True),)),
        ("a=u;tokens=512;x=1;tier=disk;y=2", (Hint("a", "u", 512, on_disk=True),)),
        ("a=u;tokens=512;tier=diskette", (Hint("a", "u", 512),)),
        ("a;tokens=512, b=u, =u;tokens=1, c=u;tokens=-1, d=u;tokens=x", ()),
        ("a=u;tokens=9999999999", ()),
        ("", ()),
        (",".join(f"n{i}=u;tokens=1" for i in range(99)), 8),
        ("x" * 100_000, ()),
    ],
)
def test_headers_are_read_with_care(header: str, hints: Any) -> None:
    """What is malformed is left out, and what is too long cut."""
    found = parse_holders(header)
    assert (len(found) if isinstance(hints, int) else found) == hints


def test_a_header_reaches_the_scheduler(manager: SimpleNamespace) -> None:
    """In SGLang's own field for hints, as the scheduler's request has it."""
    obj = SimpleNamespace(kv_hints=None)
    add_hints(manager, obj, request(GOOD))
    assert tuple(hints_of(obj)) == HINTS


def test_a_hint_of_a_disk_reaches_the_scheduler(manager: SimpleNamespace) -> None:
    """The pull is predicted to take longer."""
    obj = SimpleNamespace(kv_hints=None)
    add_hints(manager, obj, request("a=u;tokens=512;tier=disk"))
    assert tuple(hints_of(obj)) == (Hint("a", "u", 512, on_disk=True),)


def test_a_clients_own_hints_stay(manager: SimpleNamespace) -> None:
    """Ours are added to them; what is no envelope is left for SGLang to refuse."""
    theirs = Envelope("7", "m", [Action("1", "other", "1", {})])
    obj = SimpleNamespace(kv_hints=theirs)
    add_hints(manager, obj, request(GOOD))
    assert obj.kv_hints.protocol_version == "7"
    assert obj.kv_hints.actions[0].action_type == "other"
    assert tuple(hints_of(obj)) == HINTS
    broken = SimpleNamespace(kv_hints={"no": "envelope"})
    add_hints(manager, broken, request(GOOD))
    assert broken.kv_hints == {"no": "envelope"}


@pytest.mark.parametrize(
    ("header", "obj"),
    [
        (None, SimpleNamespace(kv_hints=None)),
        ("junk", SimpleNamespace(kv_hints=None)),
        (GOOD, SimpleNamespace()),
    ],
    ids=["no header", "junk", "no field"],
)
def test_nothing_is_added_where_nothing_is_said(
    manager: SimpleNamespace, header: str | None, obj: Any
) -> None:
    """Requests without the header or the field."""
    add_hints(manager, obj, request(header))
    assert not getattr(obj, "kv_hints", None)


@pytest.mark.parametrize(
    "holders", [None, "a", [["a", "u"]], [["a", "u", "5"]], [7], [{"name": "a"}]]
)
def test_what_a_client_made_up_is_no_hint(holders: Any) -> None:
    """The field is open to clients: nothing in it may break the scheduler."""
    action = Action("sgl_tiered.holders", "sgl_tiered.holders", "1", {})
    action.payload["holders"] = holders
    req = SimpleNamespace(kv_hints=Envelope("1", "m", [action]))
    assert list(hints_of(req)) == []


def test_the_shape_of_pages_tells_them_apart() -> None:
    """Heads and their bytes for KV as it is; encoded pages by what they take."""
    raw = pool_shape(PageLayout(2, 16, 256), 4)
    assert (raw.num_layers, raw.num_heads, raw.head_bytes) == (2, 4, 64)
    encoded = EncodedLayout(
        2, 16, 256, Encoding.INT8, 2, 64, 256, 256, key_group=16, value_group=64
    )
    shape = pool_shape(encoded, 2)
    each = 2 * shape.num_heads * shape.head_bytes * shape.page_tokens
    assert each == encoded.layer_page_bytes != raw.page_tokens * 2 * 256


def test_a_page_that_has_no_equal_parts_is_refused() -> None:
    """In one sentence, at start."""
    with pytest.raises(ConfigError, match="--tiered-pool"):
        pool_shape(PageLayout(2, 16, 255), 4)


def test_pulled_tokens_are_the_peers_and_not_the_hosts() -> None:
    """Never more than SGLang says came from the host."""
    req = SimpleNamespace(
        cached_tokens_device=8,
        cached_tokens_host=64,
        cached_tokens_storage=0,
        tiered_peer_tokens=48,
    )
    found = cached_by_tier(req)
    assert (found[TierId.HOST], found[TierId.PEER]) == (16, 48)
    assert sum(found.values()) == 72
    req.tiered_peer_tokens = 999
    assert cached_by_tier(req)[TierId.PEER] == 64
    del req.tiered_peer_tokens
    assert TierId.PEER not in cached_by_tier(req)
