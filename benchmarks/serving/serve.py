"""Leaves a tiered server running in the foreground and says how to ask it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.server import ServerStartError, SglangServer, exit_on_signals
from sgl_tiered_workloads.systems import CPU_FLAGS, MB, Device, Tiers, tiered_spec

MODEL = Path(__file__).resolve().parents[2] / "workloads/models/demo"
POOL_TOKENS = 16384
HOST_BYTES = 1000 * MB
DISK_BYTES = 4000 * MB


def main() -> int:
    """Run until Ctrl-C or until the server ends; its exit status is ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="random weights in place of the model that this repository trained",
    )
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--out", type=Path, default=Path("out/serve"))
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--server-flag", action="append", default=[], help="may be repeated"
    )
    args = parser.parse_args()
    exit_on_signals()
    model = MODEL
    if args.preset is not None:
        print(f"making the {args.preset} model (random weights, cached)", flush=True)
        model = make_model(args.preset, args.models)
    device = Device(model, POOL_TOKENS, flags=CPU_FLAGS)
    disk = args.out / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    spec = tiered_spec(
        device, Tiers(HOST_BYTES, disk, DISK_BYTES), flags=args.server_flag
    )
    print("python -m sglang.launch_server", *spec.command(args.port)[3:], flush=True)
    try:
        with SglangServer(spec, args.out / "logs", args.port) as server:
            return _stay(server)
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _stay(server: SglangServer) -> int:
    body = {
        "messages": [{"role": "user", "content": "def fibonacci(n):"}],
        "max_tokens": 32,
    }
    print(
        f"\nlog: {server.log_path}\n\n"
        f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: "
        f"application/json' -d '{json.dumps(body)}'\n"
        f"curl -s {server.url}/tiered/stats\n\n"
        "The model is small: what it writes looks like Python. Ctrl-C ends it.",
        flush=True,
    )
    while (exit_code := server.exit_code()) is None:
        time.sleep(0.5)
    print(server.log_tail(), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
