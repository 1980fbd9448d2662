"""A running server as ``calibrate`` sees it: requests, counters and drops over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.errors import ConfigError

__all__ = ["LiveServer", "add_key_flags"]

_TIMEOUT_S = 60.0
_BUSY = 409
_WANTS_KEY = (401, 403)


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the keys of a server at ``--url``."""
    parser.add_argument("--api-key", help="with --url: the server's --api-key")
    parser.add_argument(
        "--admin-api-key",
        help="with --url: the server's --admin-api-key; default: --api-key",
    )


class LiveServer:
    """The server at a URL.

    Args:
        url: its address.
        api_key: that requests bring; None for none.
        admin_api_key: that what changes the server brings; None for ``api_key``.

    Raises:
        ConfigError: aiohttp is not installed, or the URL is none.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "--url", f"{url!r} is no address", "write http://HOST:PORT"
            )
        try:
            from sgl_tiered_workloads.client import StreamingClient
        except ImportError:
            raise ConfigError(
                "--url", "needs aiohttp", "pip install 'sgl-tiered[bench]'"
            ) from None
        self._url = url.rstrip("/")
        self._client_class = StreamingClient
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._clock = SystemClock()
        # Like the client of the requests: no proxy stands between.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def send(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Send requests as one message, wait for all of them."""
        return asyncio.run(self._send(requests))

    async def _send(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        # A connection of its own each time: one that was kept may have been closed by
        # the server while we did not look.
        async with self._client_class(
            self._url, logprobs=False, api_key=self._api_key
        ) as client:
            return await client.send_batch(requests)

    def stats(self) -> dict[str, Any]:
        """Return the state of the tiers of the first scheduler.

        Raises:
            ConfigError: no server answers, or not a tiered one of this version.
        """
        remedy = "start the server with --radix-cache-backend tiered"
        states = self._ask("/tiered/stats", remedy)
        state = states[0] if isinstance(states, list) and states else None
        if not isinstance(state, dict) or "served" not in state:
            raise ConfigError(
                "--url", "the server does not say what it serves", "update its plugin"
            )
        return state

    def drop(self, tier: str) -> bool:
        """Forget the pages of a tier; False where the server is busy."""
        return self._tell(f"/tiered/drop?tier={tier}", "see its log")

    def now_s(self) -> float:
        """Return a monotonic time."""
        return self._clock.now()

    def rest_s(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def _ask(
        self,
        path: str,
        remedy: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
        *,
        as_admin: bool = False,
    ) -> Any:
        """Return the JSON that a path answers: to a GET, or to a POST of ``body``."""
        request = self._request(path, as_admin=as_admin)
        request.data = None if body is None else json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error, remedy) from None
        except ValueError:
            raise ConfigError("--url", f"{path} is no JSON", remedy) from None
        except OSError as error:
            raise self._unreachable(error) from None

    def _tell(self, path: str, remedy: str) -> bool:
        """POST what changes the server; False where it is busy."""
        request = self._request(path, as_admin=True, method="POST")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            if error.code == _BUSY:
                return False
            raise self._refused(path, error, remedy) from None
        except OSError as error:
            raise self._unreachable(error) from None

    def _request(
        self, path: str, *, as_admin: bool, method: str | None = None
    ) -> urllib.request.Request:
        request = urllib.request.Request(self._url + path, method=method)
        key = self._admin_api_key if as_admin else self._api_key
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        return request

    def _refused(
        self, path: str, error: urllib.error.HTTPError, remedy: str
    ) -> ConfigError:
        if error.code in _WANTS_KEY:
            remedy = "give its --api-key, and its --admin-api-key if it has one"
        return ConfigError("--url", f"{path} answers {error.code}", remedy)

    def _unreachable(self, error: OSError) -> ConfigError:
        reason = getattr(error, "reason", None) or error.strerror or error
        return ConfigError(
            "--url",
            f"no server answers at {self._url} ({reason})",
            "give the address of a running server",
        )
