"""What each transport reaches between two processes of this machine, by block size.

Mooncake over TCP, NIXL as it chooses (shared memory, on one machine) and over TCP. A
loopback is not a network: the figures say what the transports cost, not what a link
gives. Blocks lie in random order on both sides, so none are joined.

    python benchmarks/micro/transport.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
from _transport_speed import measure_transport

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.testing.transport_peer import PeerProcess, open_transport

OPENERS = {
    "mooncake tcp": ("sgl_tiered.transport.mooncake:open_mooncake", {}),
    "nixl": ("sgl_tiered.transport.nixl:open_nixl", {}),
    "nixl tcp": ("sgl_tiered.transport.nixl:open_nixl", {"UCX_TLS": "tcp"}),
    "loopback": ("sgl_tiered.transport.loopback:open_loopback", {}),
}
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


def measure(name: str, num_bytes: int, repeats: int) -> None:
    """Print one JSON object: the speeds of one transport, or why there are none."""
    opener, environment = OPENERS[name]
    os.environ.update(environment)
    try:
        transport = open_transport(opener)
    except TransportUnavailableError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    memory = np.ones(num_bytes, np.uint8)
    transport.register(memory)
    with PeerProcess(opener, num_bytes) as process:
        peer = transport.connect(process.address)
        speeds = [
            measure_transport(
                transport,
                peer,
                SystemClock(),
                block_bytes=size,
                num_blocks=num_bytes // size,
                repeats=repeats,
            )
            for size in BLOCKS
        ]
    print(json.dumps({"speeds": [asdict(speed) for speed in speeds]}), flush=True)
    transport.close()
    # NIXL may crash when the interpreter takes it down.
    os._exit(0)


def main() -> None:
    """Measure each transport in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64, help="bytes of one transfer")
    parser.add_argument("--one", choices=OPENERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.mib << 20, args.repeats)
        return
    records = {}
    print(f"{'GB/s, push / pull':20}" + "".join(f"{b >> 10:>9} KiB" for b in BLOCKS))
    for name in OPENERS:
        command = [sys.executable, __file__, "--one", name]
        command += ["--mib", str(args.mib), "--repeats", str(args.repeats)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        record = json.loads(done.stdout.splitlines()[-1])
        records[name] = record
        cells = [
            f"{s['push_bytes_per_s'] / 1e9:7.2f} /{s['pull_bytes_per_s'] / 1e9:5.2f}"
            for s in record.get("speeds", [])
        ]
        print(f"{name:20}" + ("".join(cells) or record["missing"]), flush=True)
    print(json.dumps({"transports": records, "repeats": args.repeats}))


if __name__ == "__main__":
    main()
