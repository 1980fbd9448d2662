"""What all HTTP clients share: a session while they are entered, and a clock."""

from __future__ import annotations

import time
from typing import Any, Generic, Protocol, Self, TypeVar

__all__ = ["Connected"]


class _Closable(Protocol):
    async def close(self) -> None: ...


Session = TypeVar("Session", bound=_Closable)


class Connected(Generic[Session]):
    """An async context manager with a session; a subclass says how to make it."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._zero = time.perf_counter()

    async def __aenter__(self) -> Self:
        self._session = self._connect()
        self._zero = time.perf_counter()
        return self

    async def __aexit__(self, *details: Any) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> Session:
        """The open session.

        Raises:
            RuntimeError: the client was not entered.
        """
        if self._session is None:
            raise RuntimeError("enter the client first: `async with client:`")
        return self._session

    def now_s(self) -> float:
        """Seconds since the client was entered."""
        return time.perf_counter() - self._zero

    def _connect(self) -> Session:
        """Return a new session; called within the event loop."""
        raise NotImplementedError
