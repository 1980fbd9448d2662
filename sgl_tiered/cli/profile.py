"""``sgl-tiered profile``: how sparse a model's attention is, layer by layer.

Prompts run through a served model, alone, each under a cache salt of its own, and the
server sums its attention up while it computes (engines/sglang/profiling.py). Every
prompt runs twice: its first half, then all of it with the first half from the cache, so
that what the second half reads of the first is known apart. Exit code 0 when a file was
written, 2 when something is wrong.

On the CPU backend only, so far: a CUDA server says so and is not profiled.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sgl_tiered.cli.calibrate import check_writable
from sgl_tiered.cli.live_server import add_key_flags
from sgl_tiered.cli.profile_totals import ProfileTotals
from sgl_tiered.cli.profiled_server import (
    AttentionReport,
    Profiled,
    ProfiledServer,
)
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.profile import SparsityProfile

__all__ = [
    "make_prompts",
    "profile_server",
    "read_prompts",
    "register",
    "render",
    "run",
]

_LOCAL_TOKENS = 64
_NUM_PROMPTS = 6
_PROMPT_TOKENS = 2048
_CHARS_PER_TOKEN = 8
_HOST_BYTES = 100_000_000
_SHOWN = (0.1, 0.25, 0.5)
"""Fractions of the tokens that the table shows."""

Say = Callable[[str], None]


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="measure how sparse a model's attention is, for dropping KV",
        description="Runs prompts through a tiered server on a CPU (--url; nobody else "
        "should use it) or through one that it starts (--model), and measures per "
        "layer which share of the attention entries is below 1 % of their row's "
        "maximum, and how few tokens hold what is read from afar. Measured on the CPU "
        "backend only, so far: serve the model there to profile it.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="address of a running tiered server")
    source.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a model to serve for it"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="default: beside --out"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a JSON text, or a JSON list of token ids, per line; default: our own, "
        "sources of Python's library, half of them with a register strewn in",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=_NUM_PROMPTS, help="of our own"
    )
    parser.add_argument(
        "--tokens", type=int, default=_PROMPT_TOKENS, help="of a prompt, at most"
    )
    parser.add_argument(
        "--local",
        type=int,
        default=_LOCAL_TOKENS,
        metavar="TOKENS",
        help="keys nearer than this are not long-range; default 64",
    )
    parser.add_argument("--seed", type=int, default=0, help="of our own prompts")
    add_key_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write file and plot; returns the exit code."""
    plot = arguments.plot or arguments.out.with_suffix(".png")
    for flag, path in (("--out", arguments.out), ("--plot", plot)):
        check_writable(path, flag)
    if arguments.out == plot:
        raise ConfigError("--out", "is the plot's name as well", "end it in .json")
    for flag in ("num_prompts", "tokens"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}", "is not above 0", "give 1")
    if arguments.local < 0:
        raise ConfigError("--local", "is negative", "give a number of tokens")
    given = None if arguments.prompts is None else read_prompts(arguments.prompts)
    with _server(arguments) as server:
        prompts = make_prompts(
            server, given, arguments.num_prompts, arguments.tokens, arguments.seed
        )
        profile, notes = profile_server(
            server, prompts, arguments.local, _say, created=_now()
        )
    profile.save(arguments.out)
    print("\n".join(render(profile, notes)))
    print(f"wrote {arguments.out}")
    if _draw(profile, plot):
        print(f"wrote {plot}")
    else:
        print("note: no plot without matplotlib: pip install 'sgl-tiered[bench]'")
    return 0


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return the prompts of a file of JSON lines: texts, or lists of token ids.

    Raises:
        ConfigError: the file or a line of it is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--prompts", f"{path} cannot be read ({error})", "give a file of JSON lines"
        ) from None
    found: list[str | list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        is_ids = isinstance(value, list) and all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0
            for token in value
        )
        if not value or not (isinstance(value, str) or is_ids):
            raise ConfigError(
                "--prompts",
                f"line {number} of {path} is neither a JSON text nor a list of ids",
                'write "text" or [1, 2, 3]',
            )
        found.append(value)
    if not found:
        raise ConfigError("--prompts", f"{path} holds no prompt", "write one per line")
    return found


def make_prompts(
    server: Profiled,
    given: Sequence[str | list[int]] | None,
    num_prompts: int,
    max_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Return prompts as token ids, no longer than asked for and than fits the server.

    Args:
        server: makes tokens of texts.
        given: texts and lists of ids; None for our own texts.
        num_prompts: of our own.
        max_tokens: of each.
        seed: of our own.
    """
    served = server.served()
    # The answer's token, and a page that may be half full.
    spare = 1 + int(served["model"]["page_tokens"])
    room = min(int(served["context_tokens"]), int(served["pool_tokens"])) - spare
    num_tokens = min(max_tokens, room)
    if given is None:
        from sgl_tiered_workloads.profile_texts import profile_texts

        rng = np.random.default_rng(seed)
        try:
            given = profile_texts(num_prompts, num_tokens * _CHARS_PER_TOKEN, rng)
        except ValueError as error:
            raise ConfigError("--prompts", str(error), "give a file") from None
    prompts = [server.tokens(p) if isinstance(p, str) else list(p) for p in given]
    return [prompt[:num_tokens] for prompt in prompts]


def profile_server(
    server: Profiled,
    prompts: Sequence[Sequence[int]],
    local_tokens: int,
    say: Say,
    *,
    created: str = "",
) -> tuple[SparsityProfile, list[str]]:
    """Measure a server; return the profile and what to know about it.

    Raises:
        ConfigError: the server cannot be profiled, somebody else used it, or a prompt
            is too short to have a second half far from its first.
    """
    served = server.served()
    fingerprint = server.fingerprint()
    page_tokens = int(served["model"]["page_tokens"])
    totals = ProfileTotals(local_tokens)
    try:
        for number, prompt in enumerate(prompts, 1):
            cut = len(prompt) // 2 // page_tokens * page_tokens
            if cut <= local_tokens:
                raise ConfigError(
                    "--prompts",
                    f"prompt {number} has {len(prompt)} tokens, and its first half "
                    f"must have more than the {local_tokens} of --local",
                    "give longer prompts, or a smaller --local",
                )
            salt = f"sgl-tiered-profile-{secrets.token_hex(8)}"
            parts = []
            for part in (prompt[:cut], prompt):
                server.begin(local_tokens)
                server.prefill(part, salt)
                parts.append(_checked(server.report(), len(part)))
            totals.add(*parts)
            say(f"prompt {number} of {len(prompts)}: {len(prompt)} tokens")
    finally:
        server.end()
    return totals.profile(
        model=str(served["model"]["name"]),
        fingerprint=fingerprint,
        engine=str(served["engine"]),
        created=created,
    )


def _checked(report: AttentionReport, num_tokens: int) -> AttentionReport:
    """Refuse sums that are not those of the prompt that was sent."""
    if report.num_skipped or report.first + report.num_queries != num_tokens:
        raise ConfigError(
            "--url",
            f"{report.num_queries} queries from {report.first} on were measured of a "
            f"prompt of {num_tokens} tokens, beside {report.num_skipped} other passes",
            "measure while nobody else uses the server",
        )
    return report


def render(profile: SparsityProfile, notes: Sequence[str]) -> list[str]:
    """Return the table of the layers, then notes."""
    later = profile.held_later
    curves = profile.held_by_top if later is None else later
    places = [int(np.argmin(abs(profile.fractions - share))) for share in _SHOWN]
    heads = "".join(f"{f'top {share:.0%}':>9}" for share in _SHOWN)
    lines = [
        f"{profile.model}: {profile.num_layers} layers, {profile.num_heads} heads over "
        f"{profile.num_kv_heads}; {profile.num_prompts} prompts, "
        f"{profile.num_tokens} tokens",
        "small: entries below 1 % of their row's maximum, mean and range over heads",
        f"long: attention to keys {profile.local_tokens} tokens away or more; top: of "
        + ("it" if later is None else "later text's, to the first half")
        + ", by the heaviest tokens",
        f"{'layer':>5} {'small':>7} {'least':>7} {'most':>7} {'long':>7}{heads}",
    ]
    for layer in range(profile.num_layers):
        small = profile.small_share[layer]
        numbers = [small.mean(), small.min(), small.max()]
        if profile.long_share is not None:
            numbers.append(profile.long_share[layer])
        cells = " ".join(f"{number:7.1%}" for number in numbers)
        tops = "".join(f"{curves[layer, place]:9.1%}" for place in places)
        lines.append(f"{layer:5d} {cells}{tops}")
    return lines + [f"note: {note}" for note in notes]


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[ProfiledServer]:
    """Yield the server at the URL, or start one for the model and stop it again."""
    if arguments.url is not None:
        keys = arguments.api_key, arguments.admin_api_key
        yield ProfiledServer(arguments.url, *keys)
        return
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(
            "--model",
            f"{arguments.model} holds no config.json",
            "give a model's folder",
        )
    from sgl_tiered_workloads.server import (
        ServerStartError,
        SglangServer,
        exit_on_signals,
    )
    from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec

    exit_on_signals()
    # Two prompts: the device keeps the first half while all of it runs.
    device = Device(arguments.model, max(4096, 2 * arguments.tokens), flags=CPU_FLAGS)
    spec = tiered_spec(device, Tiers(_HOST_BYTES), "profiled")
    with tempfile.TemporaryDirectory(prefix="sgl-tiered-profile-") as folder:
        server = SglangServer(spec, Path(folder), say=_say)
        try:
            server.start()
        except ServerStartError as error:
            _say(str(error))
            raise ConfigError(
                "--model", "no server starts with it", "see the end of its log above"
            ) from None
        try:
            yield ProfiledServer(server.url)
        finally:
            server.stop()


def _draw(profile: SparsityProfile, path: Path) -> bool:
    """Write the plot; False where matplotlib is missing."""
    try:
        from sgl_tiered.cli.profile_plot import draw
    except ImportError:
        return False
    path.write_bytes(draw(profile))
    return True


def _say(text: str) -> None:
    print(text, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
