"""Hypothesis strategies for what a broken or hostile neighbour says in a pool.

``envelopes`` are well formed, of the right types, and wrong: numbers out of range,
addresses twice or of others, prompts that end too early, answers to nothing. They are
JSON values, so that nothing which our own classes refuse is left out; ``on_the_wire``
makes of one the bytes that a control endpoint would get. Reading those gives a message
or a refusal, and a pool that gets the message goes on, whatever it says.

``entries`` are values that a registry may hold for a member, ``odd_endpoints`` what may
stand in one as its endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from sgl_tiered.core.plans import Int32s
from sgl_tiered.transport.messages import VERSION

__all__ = ["answers", "entries", "envelopes", "odd_endpoints", "on_the_wire"]

_NUMBERS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([-1, -(2**63), 2**31, 2**32, 2**62, 2**63, 2**64 - 1]),
)
_SECONDS = st.one_of(
    st.floats(0.0, 10.0),
    st.sampled_from([-1.0, 0.0, 1e300, float("inf"), float("-inf"), float("nan")]),
)
_TYPES = st.sampled_from([0, 1, 2, 3] * 3 + [4, -1])
_TEXTS = st.text(max_size=30)


def _mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> Any:
    """Values of the first, now and then of the second: all wrong is soon refused."""
    return st.one_of(*[usual] * 7, odd)


def _addresses(known: Sequence[int]) -> st.SearchStrategy[bytes]:
    """Lists of addresses, now and then twice, cut off, or of nobody."""
    some = st.integers(0, 2**64 - 1)
    if known:
        some = st.one_of(*[st.sampled_from(list(known))] * 4, some)
    lists = st.lists(some, max_size=6).map(lambda a: np.array(a, "<u8").tobytes())
    twice = lists.map(lambda raw: raw + raw[:8])
    return st.one_of(lists, lists, lists, twice, twice, lists.map(lambda r: r[:-3]))


def _prompts(prompts: Sequence[Int32s]) -> st.SearchStrategy[bytes]:
    whole = st.sampled_from([p.astype("<i4").tobytes() for p in prompts])
    odd = st.one_of(whole.map(lambda raw: raw[:-1]), st.binary())
    return _mostly(whole, odd)  # type: ignore[no-any-return]


@st.composite
def _bodies(
    draw: st.DrawFn,
    addresses: Sequence[int],
    numbers: Sequence[int],
    namespaces: Sequence[bytes],
    prompts: Sequence[Int32s],
) -> dict[str, Any]:
    """One body; what enters an index has the last namespace."""
    name = draw(
        st.sampled_from(
            [
                "AskBlocks",
                "FreeBlocks",
                "Finish",
                "AskHeld",
                "AskPages",
                "AskDone",
                "Cancel",
                "Answer",
            ]
        )
    )
    if name == "Answer":
        return draw(answers(addresses=addresses))
    insert = name == "Finish" and draw(st.booleans())
    namespace = st.sampled_from(namespaces[-1:] if insert else list(namespaces))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "addresses": _addresses(addresses),
        "namespace": namespace,
        "tokens": _prompts(prompts),
        "first_page": _mostly(st.integers(0, 3), _NUMBERS),
    }
    if name == "AskBlocks":
        del fields["addresses"]
        fields |= {
            "num_blocks": _mostly(st.integers(0, 3), _NUMBERS),
            "type": _TYPES,
            "only_missing": st.booleans(),
        }
    elif name == "Finish":
        fields |= {
            "type": _TYPES,
            "private": st.binary(max_size=8),
            "insert": st.just(insert),
            "sums": st.one_of(st.just(b""), st.binary(), _addresses(addresses)),
        }
    elif name == "AskHeld":
        del fields["addresses"]
    elif name == "AskPages":
        fields["timeout_s"] = _mostly(st.floats(0.0, 10.0), _SECONDS)
    elif name == "AskDone":
        fields = {"incarnation": _NUMBERS}
    elif name == "Cancel":
        known = st.sampled_from(list(numbers)) if numbers else _NUMBERS
        fields = {
            "request": st.one_of(known, _NUMBERS),
            "addresses": _addresses(addresses),
        }
    else:
        fields = {"addresses": _addresses(addresses)}
    return {"message": name, **draw(st.fixed_dictionaries(fields))}


@st.composite
def answers(
    draw: st.DrawFn, *, addresses: Sequence[int] = (), sums: Sequence[int] = ()
) -> dict[str, Any]:
    """One answer.

    Args:
        draw: Hypothesis's.
        addresses: of blocks, whosesoever.
        sums: what blocks may sum to.
    """
    fields: dict[str, st.SearchStrategy[Any]] = {
        "refusal": st.one_of(*[st.just("")] * 4, _TEXTS),
        "addresses": st.one_of(st.just(b""), _addresses(addresses)),
        "num_inserted": _NUMBERS,
        "num_pages": _NUMBERS,
        "media": st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=3),
        "sums": st.one_of(st.just(b""), _addresses(sums)),
        "num_read": _NUMBERS,
        "read_s": _SECONDS,
    }
    # Mostly right but for a field or two, which gets further.
    wrong = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    usual: dict[str, Any] = {
        "refusal": "",
        "addresses": b"",
        "num_inserted": 0,
        "num_pages": 0,
        "media": (),
        "sums": b"",
        "num_read": 0,
        "read_s": 0.0,
    }
    found: dict[str, Any] = usual | {field: draw(fields[field]) for field in wrong}
    if draw(st.booleans()):
        found["num_pages"] = len(found["sums"]) // 8
    return {"message": "Answer", **found}


@st.composite
def envelopes(
    draw: st.DrawFn,
    *,
    sender: tuple[int, int],
    receiver: tuple[int, int],
    addresses: Sequence[int] = (),
    numbers: Sequence[int] = (),
    namespaces: Sequence[bytes],
    prompts: Sequence[Int32s],
) -> dict[str, Any]:
    """One message, as JSON values and bytes.

    Args:
        draw: Hypothesis's.
        sender, receiver: the true ones: instances and incarnations; now and then the
            message has others.
        addresses: of blocks, whosesoever.
        numbers: of requests that were made, whosesoever.
        namespaces: whose prompts are named; the last one is for what is to be entered
            into the index, as pages of hostile members are what these say.
        prompts: int32 each.
    """
    number = st.one_of(st.integers(1, 200), _NUMBERS)
    if numbers:
        number = st.one_of(st.sampled_from(list(numbers)), number)
    other = st.tuples(_NUMBERS, _NUMBERS)
    return {
        "message": "Envelope",
        "sender": draw(_mostly(st.just(sender), other)),
        "receiver": draw(_mostly(st.just(receiver), other)),
        "request": draw(_mostly(st.integers(1, 1 << 40), number)),
        "settled": draw(_mostly(st.just(0), st.one_of(st.integers(0, 50), _NUMBERS))),
        "body": draw(_bodies(addresses, numbers, namespaces, prompts)),
        "nonce": draw(_mostly(st.just(0), _NUMBERS)),
    }


def on_the_wire(message: Mapping[str, Any], request_id: int = 1) -> bytes:
    """Return the bytes of a message, whether or not our own classes would make it."""
    return msgspec.msgpack.encode(
        [VERSION, request_id, 0, [60.0, 0, 0.0], dict(message)]
    )


# Made by calls, as Hypothesis tells what strategies are made of.
_DIGITS = st.just(5000).map(lambda num: "9" * num)
_LONG = st.just(1 << 17).map(lambda num: "x" * num)
_HOSTS = st.one_of(
    st.sampled_from(["h", "127.0.0.1", "[::1]", "[", "[::x]", "a..b", "", "*", "a b"]),
    st.sampled_from(["a" * 63, "a" * 64, "\ud800", "a\0", "a\nb"]),
    st.just(200).map(lambda num: "a." * num),
    _TEXTS,
)
_PORTS = st.one_of(
    _NUMBERS.map(str),
    st.sampled_from(["0", "65535", "65536", "", "*", "\u0665", "\u00b2", "5:5"]),
    _DIGITS,
    _TEXTS,
)
_SCHEMES = _mostly(
    st.just("tcp://"), st.sampled_from(["", "ipc://", "tcp:", "http://"])
)
_URLS = st.tuples(_SCHEMES, _HOSTS, _PORTS).map(lambda each: "{}{}:{}".format(*each))


def odd_endpoints() -> st.SearchStrategy[dict[str, str]]:
    """What may stand in a member's entry as its endpoints; much of it is wrong."""
    few = st.sampled_from(["\udfff", "a\nb", ""])
    texts = st.one_of(_URLS, _TEXTS, few, _DIGITS, _LONG)
    names = st.one_of(st.sampled_from(["control", "process", "http"]), _TEXTS)
    return st.one_of(
        st.fixed_dictionaries({"control": _URLS}, optional={"process": texts}),
        st.dictionaries(names, texts, max_size=4),
    )


def entries() -> st.SearchStrategy[Any]:
    """What may stand in a registry in the place of a member's entry."""
    scalars = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
    anything = st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
        ),
        max_leaves=8,
    )
    fields = st.fixed_dictionaries(
        {},
        optional={
            "name": st.one_of(st.just("p0"), anything),
            "instance": st.one_of(st.integers(0, 3), anything),
            "incarnation": st.one_of(st.integers(1, 3), anything),
            "kind": st.one_of(st.sampled_from(["decode", "encode"]), anything),
            "endpoints": st.one_of(st.just({"http": "x:1"}), odd_endpoints(), anything),
            "draining": st.one_of(st.booleans(), anything),
            "memory": anything,
            "further": anything,
        },
    )
    return st.one_of(fields, fields, anything)
