"""A server of SGLang that leaks: its scheduler keeps 716 bytes of each request.

    python -m tests.soak.planted FLAGS

The flags are those of ``sglang.launch_server``. Spawned processes import the main
module as well, so that the leak is planted in the scheduler too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sgl_tiered.metrics.ledger import RequestLedger
from tests.soak.figures import LEAK_BYTES

_KEPT: list[bytes] = []
_OBJECT_BYTES = sys.getsizeof(b"")
_finished = RequestLedger.finished


def _leaks(ledger: RequestLedger, *args: Any, **kwargs: Any) -> None:
    _KEPT.append(os.urandom(LEAK_BYTES - _OBJECT_BYTES))
    _finished(ledger, *args, **kwargs)


RequestLedger.finished = _leaks  # type: ignore[assignment, method-assign]


def main() -> None:
    """Do what ``python -m sglang.launch_server`` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
