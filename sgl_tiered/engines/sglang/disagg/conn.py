"""SGLang's transfer backend ``tiered``: its Mooncake classes over our engine.

SGLang's classes keep the conversation (bootstrap, rooms, aborts); what moves bytes
below them is ``RawEngine``. Three things differ: a decode instance tells where its
memory is with its registration; one whose push failed does not say "done" before
nothing of it can arrive any more; and memory is not taken back by the clock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.engines.device.accelerator import has_accelerator
from sgl_tiered.engines.sglang.disagg.incoming import (
    refusal_on_decode,
    refusal_on_prefill,
)
from sgl_tiered.engines.sglang.disagg.sockets import Ear, Mouth, tcp
from sgl_tiered.engines.sglang.layered.sending import LayerSources
from sgl_tiered.serving.disagg.caching import read_pd
from sgl_tiered.serving.disagg.engine import FIRST_BYTES_PER_S, RawEngine
from sgl_tiered.serving.disagg.figures import PrefillFigures, PrefillTold, read_told
from sgl_tiered.serving.disagg.layers import send_layers
from sgl_tiered.serving.disagg.opening import open_kv_transport
from sgl_tiered.serving.disagg.speaking import (
    Asked,
    Asking,
    StrangerError,
    gives_key,
    has_tag,
    proved,
    room_of,
)
from sgl_tiered.serving.disagg.starts import (
    MUTE,
    PROVES,
    START_ROUTE,
    new_start,
    start_of,
)
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.knocking import Place
from sgl_tiered.transport.release import ReleaseWatch

__all__ = [
    "TieredKVBootstrapServer",
    "TieredKVManager",
    "TieredKVReceiver",
    "TieredKVSender",
]

logger = logging.getLogger(__name__)

_ADDRESS_PART = 20
"""Place of our part in the registration message, behind SGLang's own."""
_STATUS_PARTS = 3
"""Of SGLang's status message: room, status, rank; then a reason, which we leave empty,
and our part."""
_MOST_ROOMS = 4096
"""Transfers whose requests have not ended; those that never do are forgotten."""
_SETTLE_S = 0.2
_MUTE = (
    "The prefill instance at %s proves nothing that it says: its transfer backend "
    "is another one, or an older version of this."
)
_NOWHERE = Place(("", 0))
"""It is silent: no process listens there."""


class TieredKVManager(MooncakeKVManager):
    """One rank's side of all transfers."""

    supports_role_switch = False

    def __init__(self, args: Any, mode: Any, server_args: Any, *rest: Any) -> None:
        # Who speaks: to prefill instances, and of decode instances.
        self.asking, self.asked = Asking(self._is_live), Asked(tcp)
        # By session, until SGLang has read the rest of its registration.
        self._told: OrderedDict[str, bytes] = OrderedDict()
        self._unsettled: dict[int, set[str]] = {}
        self._settling: threading.Thread | None = None
        # By room, and place: the last status that there was no room for, and whether
        # the place is one of IPv6.
        self._unsaid: OrderedDict[tuple[int, str], tuple[list[bytes], bool]] = (
            OrderedDict()
        )
        # Of both, and of the thread that looks after them.
        self._settling_lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                "requests",
                "pages",
                "tokens_held_by_decode",
                "requests_aborted",
                "returns",
                "pages_returned",
                "returns_dropped",
                "returns_failed",
                "returns_declined",
                "pages_declined",
            ),
            0,
        )
        self.incidents = Incidents("prefill and decode")
        self.releases = ReleaseWatch(SystemClock(), incidents=self.incidents)
        # What a decode instance is told of this one, given the bytes/s of the link to
        # it: who it is in the pool and what its work costs. None: nothing returns.
        self.tell: Callable[[float], PrefillFigures | None] = lambda bytes_per_s: None
        # By which weights this instance computes; None where nobody here knows.
        self.weights: Callable[[], tuple[str, str]] | None = None
        # Where layers lie that are placed one by one; None where each has its memory.
        self.sources: LayerSources | None = None
        # What was decided about returns, for ``pd_stats``.
        self.returning: Callable[[], dict[str, Any]] = dict
        self._link_bytes_per_s = FIRST_BYTES_PER_S
        # Rooms of requests that are here; and when others were last asked for.
        self.claimed: set[int] = set()
        self._asked_at_s: OrderedDict[int, float] = OrderedDict()
        self._clock: Clock = SystemClock()
        # By bootstrap address, of those that say: the start that is known.
        self._starts: dict[str, str] = {}
        # By room: what is to be told there, what was told here.
        self._telling: OrderedDict[int, PrefillTold] = OrderedDict()
        self._prefill_of: OrderedDict[int, PrefillTold] = OrderedDict()
        # A session that failed once may be tried again: our engine knows when.
        with envs.SGLANG_ENABLE_FAILED_SESSION_PROBE.override(True):
            super().__init__(args, mode, server_args, *rest)

    def init_engine(self) -> None:
        """Open the transport that was asked for."""
        self.engine = RawEngine(
            open_kv_transport(
                read_pd(self.server_args).transport,
                self.local_ip,
                self.kv_args.ib_device,
                on_device=has_accelerator(),
            ),
            SystemClock(),
            incidents=self.incidents,
        )
        logger.info("sgl-tiered: KV is transferred by %s", self.engine.kind)

    def pd_stats(self) -> dict[str, Any]:
        """Return what was transferred, JSON-able, for ``/server_info``."""
        return {
            "mode": self.disaggregation_mode.value,
            "transport": self.engine.kind,
            **self._counts,
            "bytes_pushed": self.engine.num_bytes_pushed,
            "pushes_failed": self.engine.num_failed,
            "rooms_unsettled": len(self._unsettled),
            "releases_held": self.releases.num_held,
            "refused": self.incidents.counts,
            **({"returning": told} if (told := self.returning()) else {}),
            **_sent(self.sources),
        }

    def count(self, name: str, number: int) -> None:
        """Add to a counter of ``pd_stats``; the scheduler's thread only."""
        self._counts[name] += number

    # -- Where the decode instance's memory is ---------------------------------

    def build_receiver_registration_message(self) -> list[bytes]:
        """Return SGLang's message, and our address behind it."""
        message: list[bytes] = super().build_receiver_registration_message()
        assert len(message) == _ADDRESS_PART, len(message)
        return [*message, self.engine.address_bytes()]

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Any:
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        hear = self._hear_decode if is_prefill else self._hear_prefill
        # Before SGLang's: that takes some messages for itself.
        return super()._make_worker_recv(Ear(socket, hear, self.incidents), timeout_ms)

    def _hear_prefill(self, message: list[bytes]) -> list[bytes]:
        """Return what a prefill instance says, for SGLang's thread."""
        said = self.asking.hear(message)
        if why := refusal_on_decode(self, said):
            raise ValueError(why)
        return said

    def _hear_decode(self, message: list[bytes]) -> list[bytes]:
        """Return what a decode instance says, for SGLang's thread."""
        key, said = self.asked.hear(message)
        is_registration = said[0] == b"None"
        if why := refusal_on_prefill(self, said):
            if is_registration:
                self._reject(said[3].decode(), why)
            raise ValueError(why)
        if is_registration:
            told = said[_ADDRESS_PART : _ADDRESS_PART + 1]
            self._told[said[3].decode()] = told[0] if told else b""
            if len(self._told) > _MOST_ROOMS:
                self._told.popitem(last=False)
        elif said[0] == b"ABORT":
            self._hear_abort(key, said)
        elif why := self._why_not(key, said):
            self._send_back(key, said)
            raise StrangerError(why)
        else:
            self._forget_unclaimed(room_of(said))
        return said

    def _forget_unclaimed(self, room: int) -> None:
        """Note that a room is asked for; forget those whose request has not come.

        SGLang notes whoever asks, and forgets it with the request. After the longest
        waits, as they are set for this process, a decode instance is taken to have
        given such a room up. One of which ``SGLANG_DISAGGREGATION_WAITING_TIMEOUT`` is
        set longer still waits: it is told nothing, and gives up at its own time.
        """
        now_s, asked_at_s = self._clock.now(), self._asked_at_s
        asked_at_s[room] = now_s
        asked_at_s.move_to_end(room)
        longest_s = float(
            envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
            + envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
        )
        while now_s - asked_at_s[oldest := next(iter(asked_at_s))] > longest_s:
            del asked_at_s[oldest]
            if oldest in self.claimed or oldest not in self.transfer_infos:
                continue
            self.transfer_infos.pop(oldest, None)
            self.req_to_decode_prefix_len.pop(oldest, None)
            self.request_status.pop(oldest, None)
            self.asked.end(oldest)
            self.incidents.note("unclaimed", f"no request came for room {oldest}")

    def _why_not(self, key: bytes, message: list[bytes]) -> str:
        """Return why a decode instance asks in vain; else an empty text."""
        session = message[3].decode()
        if session not in self.decode_kv_args_table:
            why = self.state_layout_rejections.get(session, "it has not registered")
            return f"{session} asks: {why}"
        if not self.asked.admit(key, message, self.transfer_infos):
            return f"{session} asks: room {room_of(message)} is of others"
        return ""

    def _hear_abort(self, key: bytes, message: list[bytes]) -> None:
        """Take note of who says an ABORT; if others have the room, it ends nothing.

        Who says this then has asked too late, or has asked for a request that had the
        same number before; it holds memory until it is told that nothing is sent there.

        Raises:
            StrangerError: others have asked for the room.
        """
        if self.asked.admit(key, message, self.transfer_infos):
            if room_of(message) not in self.request_status:
                # No request has come that would end.
                self.asked.leave(message)
            return
        notification = AbortNotification.from_zmq(message)
        target = None if notification is None else notification.deferred_ack_target()
        if target is not None and self.enable_deferred_decode_kv_release:
            self.register_deferred_ack_target(notification.room, target)
            self._maybe_ack_drained_abort(notification.room)
        raise StrangerError("b'ABORT' of a room that others have asked for")

    def _send_back(self, key: bytes, message: list[bytes]) -> None:
        """Tell who asks in vain that its transfer has failed; it registers anew."""
        place = NetworkAddress(message[1].decode(), int(message[2]))
        # Without what is told to those that the room is of.
        failed = super()._encode_kv_status_message(
            bootstrap_room=room_of(message), status=KVPoll.Failed, failure_reason=None
        )
        # Not by what is known of the room: that may be of others.
        said = proved(failed, key)
        say = partial(self._is_said, place.to_tcp(), said, is_ipv6=place.is_ipv6)
        self.incidents.guard("an answer", say)

    def _send_multipart_locked(
        self, endpoint: str, parts: list[bytes], is_ipv6: bool = False
    ) -> None:
        """Send to a decode instance, with the key of the pair; wait for nothing.

        A status that there is no room for is sent when there is, if it is still the
        last one: the decode instance waits for it.

        Raises:
            zmq.Again: there is no room for another word. One with data fails its
                transfer; that an abort is over is asked for again.
        """
        try:
            said = self.asked.say(endpoint, parts)
        except StrangerError as error:
            self.incidents.note("unsaid", str(error))
            return
        if has_tag(parts):
            if not self._is_said(endpoint, said, is_ipv6=is_ipv6):
                raise zmq.Again
            return
        at = room_of(parts), endpoint
        with self._settling_lock:
            self._unsaid.pop(at, None)
            if not self._is_said(endpoint, said, is_ipv6=is_ipv6):
                self._unsaid[at] = said, is_ipv6
                if len(self._unsaid) > _MOST_ROOMS:
                    self._unsaid.popitem(last=False)
                self._start_settling()

    def _is_said(self, endpoint: str, said: list[bytes], *, is_ipv6: bool) -> bool:
        """Send where there is room for it; return whether there was, and count.

        SGLang's thread that hears all decode instances says this, and its scheduler.
        """
        try:
            super()._send_multipart_locked(endpoint, said, is_ipv6=is_ipv6)
        except zmq.Again:
            self.incidents.note("unsaid", f"{endpoint} reads nothing that is said")
            return False
        return True

    def _say_again(self) -> None:
        """Send statuses that there was no room for; the lock is held."""
        full = set()
        for at, (said, is_ipv6) in list(self._unsaid.items()):
            if at[1] in full:
                continue
            try:
                super()._send_multipart_locked(at[1], said, is_ipv6=is_ipv6)
            except zmq.Again:
                full.add(at[1])
                continue
            except (OSError, zmq.ZMQError) as error:
                self.incidents.note("unsaid", f"{at[1]}: {error}")
            del self._unsaid[at]

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> Any:
        socket = super()._connect(endpoint, is_ipv6=is_ipv6)
        send = partial(socket.send_multipart, flags=zmq.NOBLOCK)
        return SimpleNamespace(send_multipart=send)

    def _is_live(self, room: int) -> bool:
        """Return whether a decode instance has something to hear of a room still."""
        return room in self.request_status or room in self._deferred_abort_ack_tracker

    def _publish_peer_registration(self, session: str, decode_args: Any) -> Any:
        told = self._told.pop(session, b"")
        if not told:
            why = "it does not speak ours"
        elif not gives_key(session):
            why = "it gives no key, so it is of an older version"
        else:
            why = self.engine.connect(session, told)
        ours, theirs = self.kv_args.kv_item_lens, decode_args.dst_kv_item_lens
        same_shape = decode_args.dst_attn_tp_size == self.attn_tp_size
        if not why and same_shape and theirs and list(ours) != list(theirs):
            why = f"its pages have {theirs[0]} bytes a layer, ours {ours[0]}"
        if not why and self.sources is not None:
            # SGLang would cut pages by addresses that all layers share.
            is_cut = not same_shape or decode_args.requires_dcp_relayout
            why = "layer-wise KV goes to a server of as many ranks" if is_cut else ""
        mismatch = super()._publish_peer_registration(session, decode_args)
        if why:
            return self._reject(session, why)
        if self._send_probe(session) != 0:
            # It registers anew after each failure, which does not make it well.
            with self.session_lock:
                self.failed_sessions.add(session)
        return mismatch

    def _reject(self, session: str, why: str) -> str:
        """Let transfers to a session fail, and return the reason."""
        reason = f"The decode instance cannot take KV from this one: {why}."
        with self.session_lock:
            self.state_layout_rejections[session] = reason
        return reason

    # -- Which start of a prefill instance is known ------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Ask a prefill instance for what SGLang needs, and which start this is."""
        is_new = bootstrap_addr not in self.prefill_info_table
        if not super().try_ensure_parallel_info(bootstrap_addr):
            return False
        if is_new and (start := start_of(bootstrap_addr)) is not None:
            self._starts[bootstrap_addr] = start
        return True

    def is_mute(self, bootstrap_addr: str) -> bool:
        """Return whether nothing that this instance says could be heard here."""
        return self._starts.get(bootstrap_addr) == MUTE

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """Take an instance for lost that has started anew since it was asked."""
        super()._on_heartbeat_success(bootstrap_addr)
        known, start = self._starts.get(bootstrap_addr), start_of(bootstrap_addr)
        if start in (None, known):
            return
        if known is None and start != MUTE:
            # It did not say when it was met.
            self._starts[bootstrap_addr] = start
        else:
            self._handle_node_failure(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        self._starts.pop(failed_bootstrap_addr, None)
        super()._handle_node_failure(failed_bootstrap_addr)

    # -- Layers that are placed one by one --------------------------------------

    def send_from(self, sources: LayerSources) -> None:
        """Send from where ``sources`` says that layers lie; their host rows as well."""
        address, num_bytes = sources.region
        self.engine.batch_register([address], [num_bytes])
        self.sources = sources

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: Any,
        dst_kv_ptrs: list[int],
        dst_kv_indices: Any,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Write pages of all layers to a decode instance; 0 when they have arrived."""
        told = (mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices)
        if self.sources is None:
            return int(super().send_kvcache(*told, *args, **kwargs))
        return send_layers(self.engine, self.sources, *told)

    # -- Which instance of the pool computed a prompt ---------------------------

    def note_room(self, room: int) -> None:
        """Prepare what is told with a transfer that begins; the scheduler's thread."""
        sessions = list(self.transfer_infos.get(room, ()))
        figures = self.tell(self.engine.link_bytes_per_s(sessions))
        if self.weights is not None:
            _keep(self._telling, room, PrefillTold(*self.weights(), figures))

    def prefill_of(self, room: int) -> PrefillTold | None:
        """Return what the instance behind a transfer that arrived told of itself."""
        return self._prefill_of.get(room)

    def take_prefill(self, room: int) -> PrefillFigures | None:
        """Return what is known of returns to that instance, once."""
        told = self._prefill_of.pop(room, None)
        figures = None if told is None else told.figures
        if figures is not None:
            self._link_bytes_per_s = figures.bytes_per_s
        return figures

    def link_bytes_per_s(self) -> float:
        """Return what the link from prefill instances carries, as the last one said."""
        return self._link_bytes_per_s

    def _encode_kv_status_message(self, **facts: Any) -> list[bytes]:
        parts: list[bytes] = super()._encode_kv_status_message(**facts)
        told = self._telling.get(facts["bootstrap_room"])
        if told is None or self.weights is None:
            return parts
        weights, epoch = self.weights()
        if epoch != told.epoch:
            # They changed between its first chunk and its last.
            weights = epoch = ""
        told = msgspec.structs.replace(told, weights=weights, epoch=epoch)
        return [*parts, b"", msgspec.msgpack.encode(told)]

    def parse_kv_status_message(self, msg: list[bytes]) -> Any:
        """Read SGLang's message, and what the prefill instance tells behind it."""
        parsed = super().parse_kv_status_message(msg)
        # Of a room that nobody asked for it would only be kept.
        is_told = parsed is not None and len(msg) == _STATUS_PARTS + 2
        if is_told and parsed[0] in self.request_status:
            _keep(self._prefill_of, parsed[0], read_told(msg[-1]))
        return parsed

    # -- When a transfer cannot be made -----------------------------------------

    def transfer_worker(self, queue: Any, *args: Any, **kwargs: Any) -> None:
        """Send what is queued; what raises fails its transfer, and no other."""
        taken = _Taken(queue)
        while True:
            try:
                super().transfer_worker(taken, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - others are to be sent
                self.incidents.note("failed", "a transfer could not be made", error)
                self.incidents.guard(
                    "the end of a transfer", partial(_fail, self, taken)
                )
            else:
                return

    # -- When a failed push is over --------------------------------------------

    def _poison_unsettled_send(self, room: int) -> None:
        sessions = set(self.transfer_infos.get(room, ()))
        with self._settling_lock:
            self._unsettled.setdefault(room, set()).update(sessions)
            self._start_settling()

    def _maybe_ack_drained_abort(self, room: int) -> None:
        if room not in self._unsettled:
            super()._maybe_ack_drained_abort(room)

    def _start_settling(self) -> None:
        """Let a thread look after what is left to be said; the lock is held."""
        if self._settling is None:
            self._settling = threading.Thread(
                target=self._settle, name="tiered-pd-settle", daemon=True
            )
            self._settling.start()

    def _settle(self) -> None:
        """Send what ``_maybe_ack_drained_abort`` kept, once it is true.

        And statuses that there was no room for.
        """
        while True:
            with self._settling_lock:
                done = [
                    room
                    for room, sessions in self._unsettled.items()
                    if all(self.engine.is_settled(session) for session in sessions)
                ]
                for room in done:
                    del self._unsettled[room]
                self._say_again()
                is_over = not self._unsettled and not self._unsaid
                if is_over:
                    self._settling = None
            for room in done:
                self.incidents.guard(
                    "a word on a transfer", partial(self._maybe_ack_drained_abort, room)
                )
            if is_over:
                return
            threading.Event().wait(_SETTLE_S)

    # -- When the decode instance may use memory again -------------------------

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether nobody can write to a failed transfer's memory any more."""
        has_word = super().is_abort_release_safe(bootstrap_room, required_acks)
        return self.releases.is_safe(bootstrap_room, has_word=has_word)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forget a room whose memory was given back."""
        super().clear_deferred_abort_state(bootstrap_room)
        self.releases.forget(bootstrap_room)


class TieredKVSender(MooncakeKVSender):
    """A prompt's KV on its way out."""

    supports_host_tensor_indices = has_accelerator()

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        *rest: Any,
        **more: Any,
    ) -> None:
        # Before SGLang looks at what is known of the room.
        mgr.claimed.add(bootstrap_room)
        try:
            super().__init__(mgr, bootstrap_addr, bootstrap_room, *rest, **more)
        except BaseException:
            # Nobody else would: there is no sender that could end.
            mgr.claimed.discard(bootstrap_room)
            raise
        if self.kv_mgr.sources is not None:
            # Which pages these are is asked at once.
            self.supports_host_tensor_indices = False

    def send(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        """Queue pages to be sent, from where their layers are now."""
        if self.kv_mgr.sources is not None:
            kv_indices = self.kv_mgr.sources.begin(self.bootstrap_room, kv_indices)
        super().send(kv_indices, *args, **kwargs)

    def poll(self) -> Any:
        """Return how far the transfer is; at its end nothing is read any more."""
        state = super().poll()
        if state in (KVPoll.Success, KVPoll.Failed):
            self._end()
        return state

    def clear(self) -> None:
        """Forget the transfer."""
        # First: once SGLang has forgotten it, the room may be another request's.
        self.kv_mgr.asked.end(self.bootstrap_room)
        super().clear()
        self._end()

    def abort(self) -> None:
        """End the transfer as failed."""
        super().abort()
        self._end()

    def _end(self) -> None:
        self.kv_mgr.claimed.discard(self.bootstrap_room)
        if self.kv_mgr.sources is not None:
            self.kv_mgr.sources.end(self.bootstrap_room)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Count a transfer that begins."""
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.count("requests", 1)
        self.kv_mgr.note_room(self.bootstrap_room)

    def pop_decode_prefix_len(self) -> int:
        """Return what the decode instance holds already, in tokens."""
        held = int(super().pop_decode_prefix_len())
        self.kv_mgr.count("tokens_held_by_decode", held)
        return held

    def _record_transfer_indices(self, kv_indices: Any, state_indices: Any) -> None:
        super()._record_transfer_indices(kv_indices, state_indices)
        self.kv_mgr.count("pages", len(kv_indices))


class TieredKVReceiver(MooncakeKVReceiver):
    """A prompt's KV on its way in."""

    conclude_state: Any

    def init(self, prefill_dp_rank: int) -> None:
        """Meet the prefill instance; one that could not be heard is not asked."""
        if self.conclude_state != KVPoll.Failed and self.kv_mgr.is_mute(
            self.bootstrap_addr
        ):
            self.kv_mgr.record_failure(self.bootstrap_room, _MUTE % self.bootstrap_addr)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
        super().init(prefill_dp_rank)

    def _connect_to_bootstrap_server(self, bootstrap_info: dict[str, Any]) -> Any:
        """Connect to a prefill instance; one that is nowhere is out of reach.

        What is sent there carries the key of the pair.
        """
        try:
            socket, lock = super()._connect_to_bootstrap_server(bootstrap_info)
            place = tcp(bootstrap_info["rank_ip"], bootstrap_info["rank_port"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise zmq.ZMQError(errno.EINVAL, f"it is nowhere: {error}") from error
        say = partial(self.kv_mgr.asking.say, self.bootstrap_room, place)
        return Mouth(socket, say), lock

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        """Ask for KV, and count what is asked for."""
        super().send_metadata(kv_indices, *args, **kwargs)
        self.kv_mgr.count("requests", 1)
        self.kv_mgr.count("pages", len(kv_indices))
        held = kwargs.get("decode_prefix_len") or 0
        self.kv_mgr.count("tokens_held_by_decode", held)

    def failure_exception(self) -> None:
        """Raise why the transfer failed; if not by our will, the next registers anew.

        The prefill instance may have forgotten this one, or have started anew.
        """
        if not self.abort_notified:
            self.invalidate_cached_bootstrap_infos()
        super().failure_exception()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        infos = tuple(self.bootstrap_infos)
        if force_arm or self.init_time is not None:
            places = [_place(each) for each in infos]
            self.kv_mgr.releases.hold(
                self.bootstrap_room, places, lambda: self._remind(infos)
            )
        self.kv_mgr.count("requests_aborted", 1)
        super()._send_abort_notification(force_arm=force_arm)

    def _remind(self, infos: Sequence[dict[str, Any]]) -> None:
        """Ask for the prefill's word again: what SGLang sends once may be lost."""
        generation = self._abort_generation
        if generation is None:
            return
        message = AbortNotification(
            room=self.bootstrap_room,
            decode_ip=self.kv_mgr.local_ip,
            decode_port=self.kv_mgr.rank_port,
            generation=generation,
        ).to_zmq()
        for info in infos:
            # Also what cannot be connected to.
            with contextlib.suppress(zmq.ZMQError):
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message, flags=zmq.NOBLOCK)


class TieredKVBootstrapServer(MooncakeKVBootstrapServer):
    """SGLang's own, which says where prefill instances are; and which start this is."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        start = new_start()

        async def say_start(request: web.Request) -> web.Response:
            del request
            return web.Response(text=start, headers=PROVES)

        self.app.router.add_get(START_ROUTE, say_start)


class _Taken:
    """A queue that knows what was taken from it last."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.put = queue.put
        self.last: Any = None

    def get(self) -> Any:
        """Return the next one."""
        self.last = None
        self.last = self._queue.get()
        return self.last


def _fail(manager: Any, taken: _Taken) -> None:
    """Let the transfer fail that was taken last."""
    if taken.last is not None:
        manager.conclude_failure(
            bootstrap_room=taken.last.room,
            failure_reason="The transfer could not be made: see the prefill's log.",
        )


def _place(info: Mapping[str, Any]) -> Place:
    """Return where a prefill instance says that it is; nowhere where that is odd."""
    host = info.get("rank_ip")
    try:
        port = int(info["rank_port"])
    except (KeyError, TypeError, ValueError):
        return _NOWHERE
    return Place((host, port)) if isinstance(host, str) else _NOWHERE


def _keep(rooms: OrderedDict[int, PrefillTold], room: int, told: PrefillTold) -> None:
    rooms[room] = told
    if len(rooms) > _MOST_ROOMS:
        rooms.popitem(last=False)


def _sent(sources: LayerSources | None) -> dict[str, int]:
    """Return what was sent from where, if layers are placed one by one."""
    if sources is None:
        return {}
    return {
        "bytes_from_host_rows": sources.num_host_bytes,
        "bytes_from_device": sources.num_device_bytes,
    }
