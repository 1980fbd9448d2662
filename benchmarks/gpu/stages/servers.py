"""Real servers with layer-wise KV and without, where SGLang is installed
(``movement``).

Equal answers first, then times. A machine without SGLang has none; a dry run does not
start any either, as the end-to-end tests do.
"""

from __future__ import annotations

from movement.servers import measure_servers, what_is_missing
from stages.figures import median
from stages.stage import ROOT, Stage

__all__ = ["run"]

_REPEATS = 3


def run(stage: Stage) -> None:
    """Write one record."""
    if stage.dry_run:
        stage.missing("a dry run starts no servers; the end-to-end tests do")
    missing = what_is_missing(is_cuda=True)
    if missing:
        stage.missing(f"the Python module {missing} is not installed")
    folder = ROOT / "out" / "gpu-servers"
    for record in measure_servers(folder, is_cuda=True, repeats=_REPEATS):
        stage.add(record.pop("kind"), **record)
        stage.figure("servers_exact_fraction", record["exact_fraction"])
        for name in ("mean_ttft_s", "total_s"):
            ours, theirs = (
                median({name: [one[name] for one in record[way]]}, name)
                for way in ("layered", "plain")
            )
            stage.figure(f"servers_{name}_over_plain", round(ours / theirs, 4))
