"""The registry of several machines: etcd 3, by its JSON gateway over HTTP.

Under ``/sgl-tiered/<pool>/`` there are, for ever, ``names/<name>`` (id and number of
starts), ``ids/<id>`` (the name that has it) and, until they are erased,
``notes/<name>``; and, with the lease of an instance, ``members/<id>`` and
``leaders/<role>``. Every change that depends on what was read is a
transaction that compares it again. etcd ends leases by its own clock.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.errors import ConfigError, TransportUnavailableError
from sgl_tiered.pool.etcd_access import EtcdAccess
from sgl_tiered.pool.membership import (
    InstanceKind,
    Lease,
    Member,
    Note,
    View,
    check_endpoints,
    check_name,
    first_free_id,
    incarnation_after,
    member_fields,
    members_from,
)
from sgl_tiered.transport.incidents import Incidents

__all__ = ["EtcdRegistry"]

_LOG = logging.getLogger(__name__)
_MIN_TTL_S = 2
"""etcd grants no shorter lease."""
_NO_ANSWER = (
    httpx.HTTPError,
    httpx.StreamError,
    httpx.InvalidURL,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a request ends with that etcd did not answer, or not in its words: what it says
is JSON of any shape until it is read."""
_MAX_TRIES = 20
_MAX_REVISION = (1 << 63) - 1
_REST_S = 0.2


class EtcdRegistry:
    """A ``Registry`` in etcd.

    Args:
        urls: of the gateways of one etcd, such as ``http://127.0.0.1:2379``; another
            one is asked when one does not answer.
        pool: name of the pool: pools of one etcd do not see each other.
        ttl_s: seconds from one renewal of a lease to its end, at least 2.
        timeout_s: for one request.
        clock: for ``watch``.
        client: makes the requests, with its own settings.
        access: certificates and a user, where etcd wants them.
        incidents: counts what went wrong, and entries that are passed over.

    Raises:
        ConfigError: the pool's name or the time cannot be used.
    """

    def __init__(
        self,
        *urls: str,
        pool: str = "default",
        ttl_s: float = 3.0,
        timeout_s: float = 2.0,
        clock: Clock | None = None,
        client: httpx.Client | None = None,
        access: EtcdAccess | None = None,
        incidents: Incidents | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        check_name(pool)
        if ttl_s < _MIN_TTL_S:
            raise ConfigError(
                "lease", f"etcd grants none of {ttl_s} s", "ask for 2 s at least"
            )
        self._urls = tuple(url.rstrip("/") + "/v3" for url in urls)
        self._url = self._urls[0]
        self._prefix = f"/sgl-tiered/{pool}/"
        self._ttl_s = math.ceil(ttl_s)
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._incidents = incidents or Incidents(f"etcd at {urls[0]}")
        access = access or EtcdAccess()
        self._client = client or httpx.Client(
            timeout=timeout_s, verify=access.context or True, auth=access.auth
        )
        self._pause = pause
        self._last_view = View(0)

    def join(
        self, name: str, kind: InstanceKind, endpoints: Mapping[str, str]
    ) -> Lease:
        """Begin a new incarnation; a former one under this name is over at once."""
        check_name(name)
        check_endpoints(endpoints)
        try:
            for _ in range(_MAX_TRIES):
                lease = self._try_to_join(name, kind, endpoints)
                if lease is not None:
                    return lease
        except _NO_ANSWER as error:
            raise TransportUnavailableError(
                f"etcd at {self._url} does not answer ({error}); start it, or give the "
                "address of one that runs"
            ) from None
        raise ConfigError(
            "instance name",
            f"others start under {name} all the time",
            "give every instance a name of its own",
        )

    def renew(self, lease: Lease) -> bool:
        """Prolong a lease; False if it is over, or etcd does not answer."""
        try:
            answer = self._post("lease/keepalive", {"ID": lease.token})
            return int(answer["result"].get("TTL", 0)) > 0
        except _NO_ANSWER as error:
            self._incidents.note("registry", f"a lease was not renewed: {_told(error)}")
            return False

    def drain(self, lease: Lease) -> bool:
        """Mark the instance as draining; False if its lease is over."""
        return self._change(lease, {"draining": True})

    def publish(self, lease: Lease, memory: str) -> bool:
        """Say how an instance's memory is reached; False if its lease is over."""
        return self._change(lease, {"memory": memory})

    def leave(self, lease: Lease) -> None:
        """End a lease; nothing if it is over."""
        try:
            self._post("lease/revoke", {"ID": lease.token})
        except _NO_ANSWER as error:
            # It ends by itself.
            _LOG.info("a lease could not be given back: %s", error)

    def view(self) -> View:
        """Return the members now; the last one known if there is no answer."""
        found = self.look()
        if found is None:
            self._incidents.note("registry", "it did not say who is there")
            return self._last_view
        self._last_view = found
        return found

    def look(self) -> View | None:
        """Return the members now; None if there is no answer."""
        try:
            found, revision = self._list("members/")
        except _NO_ANSWER:
            return None
        entries = {each["key"].rsplit("/", 1)[1]: _json(each) for each in found}
        return View(revision, members_from(entries, self._incidents))

    def watch(self, version: int, timeout_s: float) -> View | None:
        """Wait for a view newer than ``version``; None if none came in time."""
        key = self._key("members/")
        request = {
            "create_request": {
                "key": _encoded(key),
                "range_end": _encoded(_end_of(key)),
                "start_revision": str(version + 1),
            }
        }
        until_s = self._clock.now() + timeout_s
        while (left_s := until_s - self._clock.now()) > 0:
            try:
                if self._hear(request, left_s):
                    return self.view()
                # It has ended the watch without a word, and might again.
                self._pause(min(left_s, _REST_S))
            except httpx.TimeoutException:
                continue
            except _NO_ANSWER as error:
                self._turn()
                self._incidents.note("registry", f"a watch has ended: {_told(error)}")
                self._pause(min(left_s, self._timeout_s))
        return None

    def lead(self, role: str, lease: Lease) -> bool:
        """Try to become the leader for a role; True if the lease leads now."""
        check_name(role)
        key = f"leaders/{role}"
        me = json.dumps([lease.instance, lease.incarnation])
        try:
            nobody = _compare(self._key(key), "CREATE", "0")
            if self._transact([nobody], [self._put(key, me, lease.token)]):
                return True
            found = self._get(key)
            return found is not None and found["value"] == me
        except _NO_ANSWER:
            return False

    def leader(self, role: str) -> Member | None:
        """Return the leader for a role, or None."""
        check_name(role)
        try:
            found = self._get(f"leaders/{role}")
            if found is None:
                return None
            instance, incarnation = json.loads(found["value"])
        except _NO_ANSWER:
            return None
        member = self.view().member(instance)
        if member is None or member.incarnation != incarnation:
            return None
        return member

    def notes(self) -> Mapping[str, Note] | None:
        """Return all notes by name; None if there is no answer."""
        try:
            found, _ = self._list("notes/")
            return {
                each["key"].rsplit("/", 1)[1]: Note(
                    each["value"], int(each["mod_revision"])
                )
                for each in found
            }
        except _NO_ANSWER:
            return None

    def note(self, name: str, value: str) -> Note | None:
        """Write a note, in place of the last one of this name; None without an answer.

        Raises:
            ConfigError: the name cannot be used.
        """
        check_name(name)
        put = self._put(f"notes/{name}", value)["request_put"]
        try:
            answer = self._post("kv/put", put)
            return Note(value, int(answer["header"]["revision"]))
        except _NO_ANSWER:
            return None

    def erase(self, name: str, version: int) -> bool:
        """Remove a note; False if it has another version, or there is no answer."""
        key = self._key(f"notes/{name}")
        same = _compare(key, "MOD", str(version))
        delete = {"request_delete_range": {"key": _encoded(key)}}
        try:
            return self._transact([same], [delete])
        except _NO_ANSWER:
            return False

    def close(self) -> None:
        """Let go of connections; leases go on until they end."""
        self._client.close()

    def _change(self, lease: Lease, change: Mapping[str, Any]) -> bool:
        """Change fields of a member's entry; False if its lease is over."""
        key = f"members/{lease.instance}"
        try:
            for _ in range(_MAX_TRIES):
                found = self._get(key)
                if found is None:
                    return False
                fields = json.loads(found["value"])
                if fields["incarnation"] != lease.incarnation:
                    return False
                same = _compare(self._key(key), "MOD", found["mod_revision"])
                # The entry's own lease: who drains may be somebody else.
                token = fields.get("lease", lease.token)
                put = self._put(key, json.dumps({**fields, **change}), token)
                if self._transact([same], [put]):
                    return True
        except _NO_ANSWER:
            pass
        return False

    def _try_to_join(
        self, name: str, kind: InstanceKind, endpoints: Mapping[str, str]
    ) -> Lease | None:
        """Join once; None if another start under this name came between."""
        key = f"names/{name}"
        found = self._get(key)
        if found is None:
            taken, _ = self._list("ids/")
            names = (each["key"].rsplit("/", 1)[1] for each in taken)
            numbers = {int(name) for name in names if name.isdecimal()}
            instance, incarnation = first_free_id(numbers), 1
            id_key = f"ids/{instance}"
            same = [
                _compare(self._key(key), "CREATE", "0"),
                _compare(self._key(id_key), "CREATE", "0"),
            ]
            puts = [self._put(id_key, name)]
        else:
            known = json.loads(found["value"])
            instance = known["instance"]
            incarnation = incarnation_after(known["incarnation"])
            same = [_compare(self._key(key), "MOD", found["mod_revision"])]
            puts = []
        value = json.dumps({"instance": instance, "incarnation": incarnation})
        if not self._transact(same, [*puts, self._put(key, value)]):
            return None
        token = str(self._post("lease/grant", {"TTL": str(self._ttl_s)})["ID"])
        former = self._get(f"members/{instance}")
        member = Member(name, instance, incarnation, kind, dict(endpoints))
        fields = {**member_fields(member), "lease": token}
        still = _compare(self._key(key), "VALUE", _encoded(value))
        put = self._put(f"members/{instance}", json.dumps(fields), token)
        lease = Lease(name, instance, incarnation, float(self._ttl_s), token)
        if not self._transact([still], [put]):
            self.leave(lease)
            return None
        if former is not None:
            # What else the former start had its lease on, leadership, ends with it.
            former_token = json.loads(former["value"]).get("lease", "0")
            self.leave(Lease(name, instance, 0, 0.0, former_token))
        return lease

    def _hear(self, request: dict[str, Any], timeout_s: float) -> bool:
        """Return True as soon as etcd tells of an event."""
        with self._client.stream(
            "POST", f"{self._url}/watch", json=request, timeout=timeout_s
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.strip() and _tells_something(json.loads(line)):
                    return True
        return False

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _put(self, key: str, value: str, token: str = "0") -> dict[str, Any]:
        return {
            "request_put": {
                "key": _encoded(self._key(key)),
                "value": _encoded(value),
                "lease": token,
            }
        }

    def _get(self, key: str) -> dict[str, str] | None:
        answer = self._post("kv/range", {"key": _encoded(self._key(key))})
        found = [_decoded(each) for each in answer.get("kvs", [])]
        return found[0] if found else None

    def _list(self, key: str) -> tuple[list[dict[str, str]], int]:
        """Return all entries below a key, and the revision that this was at."""
        whole = self._key(key)
        request = {"key": _encoded(whole), "range_end": _encoded(_end_of(whole))}
        answer = self._post("kv/range", request)
        found = [_decoded(each) for each in answer.get("kvs", [])]
        revision = int(answer["header"]["revision"])
        if not 0 <= revision <= _MAX_REVISION:
            raise ValueError("etcd has no such revision")
        return found, revision

    def _transact(
        self, compare: list[dict[str, Any]], changes: list[dict[str, Any]]
    ) -> bool:
        answer = self._post("kv/txn", {"compare": compare, "success": changes})
        return bool(answer.get("succeeded", False))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._client.post(f"{self._url}/{path}", json=body)
            answer.raise_for_status()
        except httpx.HTTPError:
            self._turn()
            raise
        found = answer.json()
        if not isinstance(found, dict):
            raise TypeError(f"the answer to {path} is a {type(found).__name__}")
        return found

    def _turn(self) -> None:
        """Ask another gateway from now on."""
        at = self._urls.index(self._url)
        self._url = self._urls[(at + 1) % len(self._urls)]


def _compare(key: str, target: str, value: str) -> dict[str, Any]:
    """Return the condition that a key's revision or value is this one."""
    field = {"MOD": "mod_revision", "CREATE": "create_revision", "VALUE": "value"}
    return {"key": _encoded(key), "target": target, field[target]: value}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(entry: Mapping[str, str]) -> dict[str, str]:
    """Return key, value and revision of an entry, as text.

    One that is no text must not hide the others: it is refused where it is read.
    """
    return {
        "key": base64.b64decode(entry["key"]).decode(errors="replace"),
        "value": base64.b64decode(entry.get("value", "")).decode(errors="replace"),
        "mod_revision": entry["mod_revision"],
    }


def _json(entry: Mapping[str, str]) -> Any:
    """Return the value of an entry; its text where it is no JSON."""
    try:
        return json.loads(entry["value"])
    except (ValueError, RecursionError):
        return entry["value"]


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _end_of(prefix: str) -> str:
    """Return the first key after all that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _tells_something(message: Mapping[str, Any]) -> bool:
    """Return whether a message of a watch has events, or ends it."""
    result = message["result"]
    return bool(result.get("events")) or bool(result.get("canceled"))
