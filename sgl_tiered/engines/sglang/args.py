"""Native flags: a subclass of SGLang's ServerArgs with the ``tiered`` namespace.

Plugins are loaded before the command line is parsed, so the subclass that takes the
place of ``ServerArgs`` brings the flags into ``--help``, validation, ``/server_info``
and the pickled copy that every child process gets.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Optional

from sglang.srt.arg_groups.arg_utils import NS, Arg
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.server_args import ServerArgs

from sgl_tiered.serving.disagg.caching import declare_caching
from sgl_tiered.serving.option_reader import FIELD_PREFIX, read_server
from sgl_tiered.serving.options import CONFIG, OPTIONS, Option, Options

__all__ = ["TieredServerArgs", "tiered_options"]


def _annotation(row: Option) -> Any:
    """Return the type of a field of SGLang's arguments, with what its flag shows."""
    text = row.help if row.place == "flag" else argparse.SUPPRESS
    arg = Arg(help=text, choices=list(row.kind.choices) or None)
    # SGLang's own small parser knows not every spelling of a union.
    return Annotated[Optional[row.kind.word], arg, NS("tiered")]  # noqa: UP045


class TieredServerArgs(ServerArgs, dict=True):  # type: ignore[call-arg]
    """SGLang's arguments and ours; all of ours are None where they are not given."""

    # Its fields are the rows: SGLang reads a record's annotations at run time.
    __annotations__ = {
        FIELD_PREFIX + row.name: _annotation(row) for row in (CONFIG, *OPTIONS.values())
    }
    vars().update(dict.fromkeys(__annotations__))

    def resolve_once(self) -> None:
        """Declare what a caching mode asks of SGLang, then resolve."""
        if not getattr(self, "_resolution_finished", False):
            asked: dict[str, Any] = declare_caching(self)
            if asked:
                declare_resolution(self, "sgl-tiered", **asked)
        super().resolve_once()

    def check_server_args(self) -> None:
        """Check our settings before SGLang checks its own.

        Raises:
            ConfigError: one sentence about what is wrong.
        """
        tiered_options(self, is_first=True)
        super().check_server_args()


def tiered_options(server_args: Any, *, is_first: bool = False) -> Options | None:
    """Return the settings, or None where the server is not tiered.

    Args:
        server_args: SGLang's, with ours.
        is_first: no rank of the server has taken memory yet.

    Raises:
        ConfigError: a setting is wrong, or does not go with another flag.
    """
    from sglang.srt.platforms import current_platform

    given = str(getattr(server_args, "device", None) or "cpu")
    device = "cuda" if current_platform.is_cuda() else given.partition(":")[0]
    return read_server(server_args, device, resolving_view, is_first=is_first)
