"""What other instances and the registry say: messages, pools at work, entries."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from sgl_tiered.core.addresses import MAX_INSTANCE, MAX_SLOT
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool import membership, messages, requests
from sgl_tiered.pool.channel import MESSAGES
from sgl_tiered.pool.guard import Guard
from sgl_tiered.pool.local_registry import LocalRegistry, _Fields
from sgl_tiered.pool.membership import (
    MAX_INCARNATION,
    InstanceKind,
    Lease,
    View,
    members_from,
)
from sgl_tiered.pool.messages import Cancel, Envelope, Finish, as_entry, from_entry
from sgl_tiered.testing.hostile import entries, envelopes
from sgl_tiered.transport import messages as wire
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.messages import Part, Refused, Times
from tests.fuzz.kit import (
    Fault,
    Rng,
    Tally,
    Target,
    as_json,
    demand,
    drawn,
    is_sentence,
    mangled,
    mutated,
    pick,
)
from tests.property.test_hostile_pool_machine import SOME, HostilePoolMachine

_TIMES = 10
"""So often is each value of a strategy used, as drawing takes most of the time."""

__all__ = ["PoolStates", "RegistryEntries", "WireMessages"]


class _Raw(msgspec.Struct, array_like=True):
    version: int
    request_id: int
    part: int
    times: Any
    body: Any


class WireMessages(Target):
    """Bytes of a control connection: a message that keeps its rules, or a refusal."""

    name = "wire messages"
    faults = (
        Fault(
            "addresses are not looked at",
            lambda patch: patch.setattr(
                messages, "_demand_addresses", lambda raw: None
            ),
        ),
        Fault(
            "numbers have no bounds",
            lambda patch: patch.setattr(messages, "_demand_count", lambda *args: None),
        ),
        Fault(
            "any version is read",
            lambda patch: patch.setattr(
                wire.MessageSet,
                "head",
                lambda self, data: SimpleNamespace(version=wire.VERSION),
            ),
        ),
    )

    def inputs(self, rng: Rng) -> Iterator[bytes]:
        """Well-formed and wrong ones, those with other types, and broken bytes."""
        known = [int(a) for a in rng.integers(0, 2**63, 8)]
        strategy = envelopes(
            sender=(2, 1),
            receiver=(0, 1),
            addresses=known,
            numbers=[3, 5],
            namespaces=[b"", b"x" * 64, b"x" * 65],
            prompts=SOME,
        )
        while True:
            for message in drawn(strategy, rng) * _TIMES:
                if rng.random() < 0.4:
                    right = [wire.VERSION, 1, 0, [60.0, 0, 0.0], _right(rng)]
                    changed = mutated(rng, right, num=int(rng.integers(2)))
                    with contextlib.suppress(OverflowError, UnicodeEncodeError):
                        yield msgspec.msgpack.encode(changed)
                    continue
                envelope = [wire.VERSION, 1, 0, [60.0, 0, 0.0], message]
                kind = int(rng.integers(4))
                if kind <= 1:
                    envelope = mutated(rng, envelope, num=kind + 1)
                elif kind == 2 and rng.random() < 0.3:
                    envelope[0] = pick(rng, (0, 1, wire.VERSION + 1, -1))
                try:
                    raw = msgspec.msgpack.encode(envelope)
                except (OverflowError, UnicodeEncodeError, RecursionError):
                    raw = b"\xc1"
                yield mangled(rng, raw) if kind == 3 else raw

    def check(self, given_input: bytes) -> bool:
        """What is read can be written and read again."""
        found = MESSAGES.decode(given_input)
        if isinstance(found, Refused):
            demand(
                found.reason in ("unreadable", "version", "too-big") and found.detail,
                f"a refusal of another kind: {found}",
            )
            return False
        head, message = found
        said = msgspec.msgpack.decode(given_input, strict=False)
        demand(said[0] == wire.VERSION, f"version {said[0]} was read")
        if isinstance(message, Envelope):
            self._obeys(message)
        again = MESSAGES.encode(head.request_id, Part.REQUEST, message, Times())
        demand(isinstance(again, bytes), "what was read cannot be written")
        second = MESSAGES.decode(again)
        demand(
            not isinstance(second, Refused) and second[1] == message,
            "it is another message when it is read again",
        )
        return True

    def _obeys(self, envelope: Envelope) -> None:
        for instance, incarnation in (envelope.sender, envelope.receiver):
            demand(0 <= instance <= MAX_INSTANCE, "an instance out of range")
            demand(0 <= incarnation <= MAX_INCARNATION, "a start out of range")
        demand(0 <= envelope.settled <= envelope.request < 2**63, "a number too many")
        body = envelope.body
        raw = getattr(body, "addresses", b"")
        words = np.frombuffer(raw, "<u8", len(raw) // 8).tolist()
        demand(len(raw) % 8 == 0, "an address is cut off")
        demand(len(set(words)) == len(words), "an address is there twice")
        for name in ("num_blocks", "first_page", "num_pages", "num_inserted"):
            count = getattr(body, name, 0)
            demand(0 <= count <= MAX_SLOT + 1, f"{name} is {count}")
        demand(len(getattr(body, "tokens", b"")) % 4 == 0, "a token is cut off")
        demand(len(getattr(body, "namespace", b"")) <= 64, "a long namespace")
        for name in ("timeout_s", "read_s"):
            demand(0.0 <= getattr(body, name, 0.0) <= 86400.0, f"{name} out of range")
        if isinstance(body, Finish) and body.sums:
            demand(len(body.sums) == len(raw), "other sums than addresses")
        if isinstance(body, Cancel):
            demand(body.request < envelope.request, "it cancels the future")


class PoolStates(Target):
    """Pools at work, and a member that says anything: ``test_hostile_pool_machine``.

    One input is one message of that member; the laws are the machine's.
    """

    name = "pool state machine"
    faults = (
        Fault(
            "anybody may say anything",
            lambda patch: patch.setattr(Guard, "admits", lambda *args: True),
        ),
        Fault(
            "any answer fits",
            lambda patch: patch.setattr(requests, "misfit", lambda *args: ""),
        ),
    )

    def drive(self, num: int, number: int, tally: Tally, *, once: bool) -> None:
        """Run machines until enough messages were said."""

        class Counted(HostilePoolMachine):
            def deliver(
                self, n: int, message: dict, key: str, *, poll: bool = True
            ) -> None:
                tally.inputs += 1
                before = len(self.numbers)
                super().deliver(n, message, key, poll=poll)
                is_read = len(self.numbers) > before
                tally.accepted += is_read
                tally.refused += not is_read

        first = number * 1_000_000
        while tally.inputs < num and not (once and tally.found):
            Counted.in_cache = bool(first % 2)
            limits = settings(
                max_examples=10,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                print_blob=False,
                report_multiple_bugs=False,
            )
            try:
                run_state_machine_as_test(seed(first)(Counted), settings=limits)
            except Exception as error:  # noqa: BLE001 - anything is a finding
                tally.note(error, f"machine of seed {first}")
            first += 1


class RegistryEntries(Target):
    """A registry's file and the entries in it."""

    name = "registry entries"
    faults = (
        Fault(
            "names are not looked at",
            lambda patch: patch.setattr(membership, "check_name", lambda name: None),
        ),
        Fault(
            "incarnations have no end",
            lambda patch: patch.setattr(membership, "MAX_INCARNATION", 1 << 80),
        ),
        Fault(
            "memory is not looked at",
            lambda patch: patch.setattr(
                messages, "from_entry", lambda text: json.loads(text)
            ),
        ),
    )

    def __enter__(self) -> RegistryEntries:
        """Write a registry of two members."""
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-registry-"))
        self._path = self._folder / "registry.json"
        self._clock = ManualClock()
        registry = LocalRegistry(self._path, clock=self._clock)
        lease = registry.join("p0", InstanceKind.PREFILL, {"http": "127.0.0.1:1"})
        registry.join("d1", InstanceKind.DECODE, {"http": "127.0.0.1:2"})
        registry.publish(lease, _memory())
        registry.lead("planner", lease)
        registry.note("some", "text")
        self._right = json.loads(self._path.read_text())
        return self

    def __exit__(self, *error: object) -> None:
        """Remove it."""
        shutil.rmtree(self._folder)

    def inputs(self, rng: Rng) -> Iterator[tuple[str, Any]]:
        """Files that are nearly right, entries and memories of all kinds."""
        member = self._right["members"]["0"]
        memory = json.loads(_memory())
        while True:
            for entry in drawn(entries(), rng) * _TIMES:
                kind = int(rng.integers(5))
                if kind == 0:
                    yield "file", as_json(mutated(rng, self._right))
                elif kind == 1:
                    yield "file", mangled(rng, as_json(self._right))
                elif kind == 2:
                    yield "entry", entry
                elif kind == 3:
                    yield "entry", mutated(rng, member)
                else:
                    text = as_json(mutated(rng, memory)).decode()
                    yield "memory", text

    def check(self, given_input: tuple[str, Any]) -> bool:
        """Members are members; what is none is counted; a broken file is refused."""
        what, value = given_input
        if what == "memory":
            return self._memory_is_right(value)
        incidents = Incidents()
        if what == "entry":
            return self._members_are_right(
                members_from({"0": value}, incidents), 1, incidents
            )
        self._path.write_bytes(value)
        try:
            registry = LocalRegistry(self._path, clock=self._clock, incidents=incidents)
        except ConfigError as error:
            demand(is_sentence(str(error)), f"no sentence: {error}")
            return False
        view = registry.look()
        demand(isinstance(view, View), "a file that was taken cannot be read")
        self._members_are_right(view.members, 0, incidents)
        registry.leader("planner")
        registry.notes()
        lease = Lease("p0", 0, 1, 3.0)
        registry.renew(lease)
        registry.join("new", InstanceKind.DECODE, {})
        state = json.loads(self._path.read_text())
        state["version"] = state.pop("view_version")
        state.setdefault("notes", {})  # left out where there are none
        msgspec.convert(state, _Fields)
        return True

    def _members_are_right(
        self, members: tuple[Any, ...], num: int, incidents: Incidents
    ) -> bool:
        ids = [member.instance for member in members]
        demand(ids == sorted(set(ids)), "an id is there twice")
        for member in members:
            demand(0 <= member.instance <= MAX_INSTANCE, "an id out of range")
            demand(1 <= member.incarnation < 2**32, "a start out of range")
            name = member.name
            demand(
                0 < len(name) <= 200 and name.isascii() and name.isprintable(),
                f"the name {name[:20]!r}",
            )
            demand(" " not in name, "a name with a space")
            demand(isinstance(member.draining, bool), "draining is no boolean")
        left_out = num - len(members)
        demand(
            incidents.counts.get("entry", 0) >= left_out, "nobody counts what is passed"
        )
        return not left_out

    def _memory_is_right(self, text: str) -> bool:
        try:
            info = messages.from_entry(text)
        except ValueError as error:
            demand(str(error), "a refusal without a word")
            return False
        if info is None:
            return True
        demand(isinstance(info, messages.PoolInfo), "memory of another kind")
        demand(from_entry(as_entry(info)) == info, "it is another when read again")
        for rank in info.ranks:
            for place in rank.places:
                demand(
                    0 <= place.region < len(rank.address.regions),
                    "a medium lies in no region",
                )
        return True


def _right(rng: Rng) -> dict[str, Any]:
    """Return an envelope with nothing wrong in it."""
    words = rng.integers(0, 2**63, 2).astype("<u8").tobytes()
    prompt = {"namespace": b"a", "tokens": bytes(16), "first_page": 1}
    body = pick(
        rng,
        (
            {"message": "AskBlocks", "num_blocks": 2, "type": 1, **prompt},
            {"message": "FreeBlocks", "addresses": words},
            {
                "message": "Finish",
                "addresses": words,
                "type": 1,
                "private": b"",
                "insert": True,
                "sums": words,
                **prompt,
            },
            {"message": "AskHeld", **prompt},
            {"message": "AskPages", "addresses": words, "timeout_s": 1.0, **prompt},
            {"message": "AskDone", "incarnation": 1},
            {"message": "Cancel", "request": 3, "addresses": words},
            {"message": "Answer", "num_pages": 2, "sums": words, "media": [[1, 2]]},
        ),
    )
    return {
        "message": "Envelope",
        "sender": [2, 1],
        "receiver": [0, 1],
        "request": 9,
        "settled": 2,
        "body": body,
        "nonce": 7,
    }


def _memory() -> str:
    from sgl_tiered.core.ids import TierId
    from tests.property.pool_world import Node, World

    world = World()
    node: Node = world.start(0, {TierId.DEVICE: 3, TierId.HOST: 2})
    return as_entry(node.pool.info)
