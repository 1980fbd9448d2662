"""When NIXL's agent of a peer is made and removed, by a stand-in of its module."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_tiered.transport import nixl
from sgl_tiered.transport.base import PeerAddress, TransferStatus

ADDRESS = PeerAddress("nixl", "far", (), b"far")
PIECE = np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64)


class RemoteDisconnectError(Exception):
    """As NIXL names what it raises for a lost peer."""


class Agent:
    """Keeps an agent's endpoint, failed or not, until it is removed."""

    def __init__(self, *_: Any) -> None:
        self.endpoints: dict[str, list[str]] = {}

    def add_remote_agent(self, metadata: bytes) -> str:
        self.endpoints.setdefault(metadata.decode(), [])
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        del self.endpoints[name]

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return rows

    def initialize_xfer(self, kind: str, local: Any, remote: Any, name: str) -> str:
        if self.endpoints[name]:
            raise RemoteDisconnectError(self.endpoints[name][0])
        return name

    def transfer(self, handle: str) -> str:
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: str) -> None:
        pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    api = SimpleNamespace(nixl_agent_config=lambda **_: None, nixl_agent=Agent)
    monkeypatch.setattr(nixl, "import_nixl", lambda: api)
    return nixl.NixlLibrary()


def arrives(library: Any, link: Any) -> bool:
    """Return whether a push ends well."""
    ((_, ticket),) = library.submit(link, True, *PIECE)
    return ticket is not None and library.check(ticket) is TransferStatus.DONE


def test_a_lost_peer_that_is_connected_anew_is_reached(library: Any) -> None:
    """Though the connection that saw it lost is ended only after that."""
    former = library.connect(ADDRESS)
    assert arrives(library, former)
    library._agent.endpoints["far"].append("the cable")
    assert not arrives(library, former)
    assert "the cable" in library.gone(former)
    again = library.connect(ADDRESS)
    library.disconnect(former)
    assert arrives(library, again)
    library.disconnect(again)
    assert library._agent.endpoints == {}


def test_a_peer_is_forgotten_with_its_last_connection(library: Any) -> None:
    """Also where the first one had seen it lost."""
    links = [library.connect(ADDRESS) for _ in range(3)]
    library.disconnect(links[1])
    assert arrives(library, links[0])
    links[2].why_gone = "it was silent"
    links.append(library.connect(ADDRESS))
    library.disconnect(links[3])
    assert arrives(library, links[0])
    library.disconnect(links[0])
    library.disconnect(links[2])
    assert library._agent.endpoints == {}
