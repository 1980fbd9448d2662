"""Counts what would hold the scheduler's thread on each way of a page: make host-waits.

    python tests/contract/count_waits.py

Runs the stories of ``waits_program.py``, each in a process of its own. The last line is
one JSON object: ``host_waits_on_scheduler``, calls of the product's code, and of
SGLang's for it, that would wait for the device on plain tiers; ``pinned_allocations``
and ``held``, those of pinned memory there, and waits for a thread that waits for the
device; ``not_taken``, the ways on which nothing moved there, so that nothing could be
counted; ``layerwise`` and ``sparse``, the places that do wait where KV is placed
singly; and ``planted_caught``, whether each wait that was put in on purpose was seen.
Where a story failed or took too long it is ``error`` alone. The exit status is 0 where
plain tiers have no wait, all ways were taken and all plants were seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["STORIES", "main", "places", "summary", "told_by"]

ROOT = Path(__file__).parents[2]
PLAIN = ("plain rust", "plain python", "ahead rust", "split rust")
STORIES = (*PLAIN, "planted rust", "layerwise rust", "layerwise_cuda rust")
STORIES += ("sparse rust",)
_TIMEOUT_S = 280.0
_TAKEN = {
    "offload": "device->host",
    "offload ahead": "device->host",
    "hit from host": "host->device",
    "hit from host, late": "host->device",
    "hit from disk": "disk->host",
    "hit from disk beside a prefill": "disk->host",
    "queue": "host->device",
    "chunks behind a hit": "host->device",
    "eviction": "device->host",
    "retraction": "retracted",
    "prefetch to host": "promoted_pages",
    "prefetch to device": "fetched_pages",
    "prefetch taken back": "fetches_cancelled",
    "aborted while it loads": "host->device",
    "aborted while it is fetched": "fetches_cancelled",
    "split": "decisions_split",
}
"""What shows that a way of plain tiers was taken, of ``moved``."""


def places(*stories: Mapping[str, Any]) -> set[str]:
    """Return where the thread would wait, but for the CPU's own attention."""
    found: set[str] = set()
    for told in stories:
        found.update(*told["host_waits_on_scheduler"].values())
    return {place for place in found if "attention.py" not in place}


def summary(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last line.

    Args:
        told: what ``waits_program.py`` tells, by story and core.
    """

    def count(*kinds: str) -> int:
        return sum(
            sum(by_place.values())
            for story in PLAIN
            for kind in kinds
            for by_place in told[story][kind].values()
        )

    return {
        "host_waits_on_scheduler": count(
            "host_waits_on_scheduler", "in_sglang_for_ours"
        ),
        "pinned_allocations": count("pinned_allocations"),
        "held": sum(len(told[story]["held"]) for story in PLAIN),
        "not_taken": [
            f"{story}: {path}"
            for story in PLAIN
            for path, moved in told[story]["moved"].items()
            if not moved.get(_TAKEN[path])
        ],
        "layerwise": sorted(
            places(told["layerwise rust"], told["layerwise_cuda rust"])
        ),
        "sparse": sorted(places(told["sparse rust"])),
        "planted_caught": _is_caught(told["planted rust"]),
    }


def _is_caught(told: Mapping[str, Any]) -> bool:
    """Say whether each plant was seen, and nothing where nothing is planted."""
    waits = dict(told["host_waits_on_scheduler"])
    # A sleep waits for no device, and is told with the threads.
    slept = told["waits_for_threads"]["sleep"]
    is_clean = waits.pop("nothing") == {} and waits.pop("sleep") == {}
    is_slept = any("_page_numbers" in place for place in slept)
    return is_clean and is_slept and bool(waits) and all(waits.values())


def told_by(story: str) -> dict[str, Any]:
    """Return what ``waits_program.py`` tells of a story and core.

    Raises:
        RuntimeError: it failed or was not done in time; says the end of its errors.
    """
    program = str(Path(__file__).with_name("waits_program.py"))
    # SGLang compiles a penalty, which takes minutes on a busy machine.
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    # Two of torch's threads wait for each other actively.
    env.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, program, *story.split(), folder],
                capture_output=True,
                text=True,
                env=env,
                cwd=ROOT,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {_TIMEOUT_S:.0f} s") from None
        except subprocess.CalledProcessError as problem:
            raise RuntimeError(problem.stderr[-4000:]) from None
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> int:
    """Run the stories; print the last line and return the exit status."""
    told = {}
    for story in STORIES:
        try:
            told[story] = told_by(story)
        except RuntimeError as problem:
            print(problem, file=sys.stderr)
            print(json.dumps({"error": f"the story {story!r} did not end well"}))
            return 1
        waits = told[story]["host_waits_on_scheduler"]
        counted = {path: sum(found.values()) for path, found in waits.items()}
        print(f"{story}: {json.dumps(counted)}", flush=True)
    found = summary(told)
    print(json.dumps(found), flush=True)
    none = ("host_waits_on_scheduler", "pinned_allocations", "held", "not_taken")
    is_good = not any(found[name] for name in none) and found["planted_caught"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
