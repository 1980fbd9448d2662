"""``python -m tests.equality``: does every combination answer as plain SGLang does?

Runs worlds (``plan.py``) for so many minutes, those first that earlier calls on the
same source ran least, and writes after each what came of it. The last line is one JSON
object; the exit code is 0 only if no answer was wrong, no request failed that had not
to, and every planted fault was caught. A call of 45 minutes over all pairs also has to
leave no cell empty and no feature idle in a pair, but where ``plan.INERT`` says why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

# Read when torch is loaded, in every server: see tests/README.md.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sgl_tiered_workloads.fork_server import fork_servers
from sgl_tiered_workloads.harness.keeping import run_facts
from sgl_tiered_workloads.server import exit_on_signals

from tests.e2e.conftest import Servers
from tests.e2e.test_tensor_parallel import on_two_ranks
from tests.equality.plan import FEATURES, World, next_worlds, pair_name
from tests.equality.playing import Player
from tests.equality.reference import (
    Kind,
    Reference,
    get_reference,
    plain,
    record_reference,
)
from tests.equality.rigs import RefusedError, kind_of, opened
from tests.equality.tally import (
    LONG_MINUTES,
    SOURCES,
    is_right,
    read_calls,
    refused_pairs,
    summary,
    times_run,
    write_call,
)

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).with_name("records")
_MOST_WORLD_S = 70.0
"""After its servers have started; slow ones then skip what is left."""
_LEAST_S = 45.0
"""A world that has less than this left is not begun."""
_END_S = 25.0
"""Before the end of a call, when worlds begin nothing new."""


class Call:
    """One call: its worlds, one after the other, and its record.

    Args:
        minutes: that it may take.
        folder: for its record.
        scratch: for logs, disks and references.
        seed: of the prompts.
    """

    def __init__(self, minutes: float, folder: Path, scratch: Path, seed: int) -> None:
        self._began_s = time.monotonic()
        self._end_s = self._began_s + 60.0 * minutes
        self._scratch = scratch
        facts = run_facts("make equality", ROOT, SOURCES)
        self.source = facts["source"]
        self.before = read_calls(folder, self.source)
        self._seed = seed + len(self.before)
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self._path = folder / f"{self.source[:12]}-{now}.json"
        self.told: dict[str, Any] = {
            **facts,
            "seed": self._seed,
            "asked": {"minutes": minutes, "pairs": []},
            "minutes": 0.0,
            "worlds": [],
        }

    def run(self, wanted: set[str]) -> None:
        """Run worlds until the time is up, always one of the pairs that ran least."""
        self.told["asked"]["pairs"] = sorted(wanted)
        while self._left_s() > _LEAST_S:
            calls = [*self.before, self.told]
            refused = refused_pairs(calls)
            for world in next_worlds(times_run(calls)):
                if world.pair not in refused and (not wanted or world.pair in wanted):
                    self._keep(self._one(world))
                    break
            else:
                break

    def say(self, text: str) -> None:
        """Say how far it is."""
        minutes = (time.monotonic() - self._began_s) / 60.0
        print(f"[equality {minutes:5.1f} min] {text}", file=sys.stderr, flush=True)

    def _one(self, world: World) -> dict[str, Any]:
        """Run one world; whatever goes wrong in it is an error of its record."""
        on = [name for name in FEATURES if name in world.on]
        told: dict[str, Any] = {"pair": world.pair, "tiers": world.tiers, "on": on}
        began_s = time.monotonic()
        with _folder(self._scratch) as folder:
            player: Player | None = None
            failure = ""
            try:
                reference = self._reference(kind_of(world))
                began_s = time.monotonic()
                with opened(world, reference, folder) as rig:
                    told["start_s"] = round(time.monotonic() - began_s, 1)
                    end_s = min(time.monotonic() + _MOST_WORLD_S, self._end_s - _END_S)
                    player = Player(world, rig, reference, end_s, self.say)
                    player.play()
            except RefusedError as refusal:
                told["refused"] = str(refusal)
            except Exception:  # noqa: BLE001 - whatever it is, it is an error of ours
                failure = traceback.format_exc()[-3000:]
                self.say(failure)
            if player is not None:
                told |= player.outcome()
            if failure:
                told |= _failed(told, failure)
            if told.get("errors") or told.get("wrong"):
                self._keep_logs(folder, world.pair)
        told["seconds"] = round(time.monotonic() - began_s, 1)
        return told

    def _keep_logs(self, folder: Path, name: str) -> None:
        """Keep what the servers of a world have said, for who looks for the cause."""
        kept = self._scratch / "kept" / f"{name}-{len(self.told['worlds'])}"
        kept.mkdir(parents=True, exist_ok=True)
        for place, log in enumerate(sorted(folder.rglob("*.log"))):
            shutil.copy(log, kept / f"{place}-{log.name}")

    def _reference(self, kind: Kind) -> Reference:
        """Return plain SGLang's answers, recorded now if they are not kept."""
        folder = self._scratch / "reference"
        spec = plain(kind)
        if kind.num_ranks > 1:
            spec = on_two_ranks(spec)
        place = (self._seed, self.source, folder)
        found = get_reference(kind, *place, spec)
        if found is None:
            with _folder(self._scratch) as logs:
                servers = Servers(logs)
                try:
                    record_reference(servers.get(spec), kind, *place)
                finally:
                    servers.abandon()
            found = get_reference(kind, *place, spec)
            assert found is not None
            self.say(f"plain {kind.name}: {found.spread}")
        return found

    def _keep(self, told: dict[str, Any]) -> None:
        self.told["worlds"].append(told)
        self.told["minutes"] = round((time.monotonic() - self._began_s) / 60.0, 1)
        write_call(self._path, self.told)
        names = ("compared", "exact", "strict", "wrong", "errors", "kills")
        counts = ", ".join(f"{name} {told[name]}" for name in names if name in told)
        self.say(
            f"{told['pair']} on {'+'.join(told['tiers'])}: "
            f"{told.get('refused') or counts}, {told['seconds']:.0f} s"
        )
        for line in told.get("told", ()):
            self.say(f"  {line}")

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()


def _failed(told: dict[str, Any], failure: str) -> dict[str, Any]:
    """Return the counts of a world that broke, which is an error."""
    counts = {
        "judged": 0,
        "compared": 0,
        "exact": 0,
        "strict": 0,
        "wrong": 0,
        "kills": 0,
        "planted": 0,
        "planted_caught": 0,
        "split": 0,
        "by_tier": {},
        "evidence": {},
        "struck": [],
        **told,
    }
    return {
        **counts,
        "errors": told.get("errors", 0) + 1,
        "told": [*told.get("told", []), failure],
    }


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """Make a folder for one world, and remove it."""
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="world-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="make equality")
    parser.add_argument("--minutes", type=float, default=LONG_MINUTES)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder")
    parser.add_argument("--scratch", type=Path, default=ROOT / "out" / "equality")
    parser.add_argument(
        "--pairs",
        nargs="+",
        default=[],
        help="of features, such as layerwise+ranks; all if none is named",
    )
    args = parser.parse_args()
    wanted = {pair_name(name.split("+")) for name in args.pairs}
    exit_on_signals()
    call = Call(args.minutes, args.records, args.scratch, args.seed)
    fork_servers()
    try:
        call.run(wanted)
    except KeyboardInterrupt:
        call.say("interrupted: what was run until then is kept")
    finally:
        fork_servers(False)
        told = summary([*call.before, call.told])
        print(dumps(told), flush=True)
    return 0 if is_right(told) else 1


if __name__ == "__main__":
    sys.exit(main())
