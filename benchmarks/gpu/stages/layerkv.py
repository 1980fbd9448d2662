"""Layer-wise KV: layers streamed through two halves, and activations rebuilt beside.

By the product's mover and copiers (``movement``): a forward whose whole prefix lies in
host memory, pinned and pageable; the way down; then layers of which half of the pages
come as activations. Answers and bytes are compared first.
"""

from __future__ import annotations

from typing import Any

from movement.acts import measure_acts
from movement.layers import measure_layers
from movement.place import Place
from movement.stack import StackShape
from stages.figures import median
from stages.overlap import DRY_STACK
from stages.stage import Stage

__all__ = ["run"]

_REPEATS = 9


def run(stage: Stage) -> None:
    """Write the records; raises AssertionError for another answer."""
    dry = stage.dry_run
    place = Place("cpu" if dry else "cuda")
    shape = DRY_STACK if dry else StackShape()
    sizes: dict[str, Any] = {
        "page_tokens": 16,
        "cached_tokens": 64 if dry else 2048,
        "repeats": 2 if dry else _REPEATS,
    }
    new_tokens = 16 if dry else 2048
    for record in measure_layers(place, shape, new_tokens=new_tokens, **sizes):
        longer = max(median(record, "forward_s"), median(record, "link_s"))
        record["efficiency"] = median(record, "both_s") / longer
        rate = record["stream_bytes"] / median(record, "down_s") / 1e9
        stage.add(record.pop("kind"), **record)
        way = record["way"]
        stage.figure(f"streamed_{way}", round(record["efficiency"], 4))
        stage.figure(f"layers_down_gb_per_s_{way}", round(rate, 2))
    for record in measure_acts(place, shape, **sizes):
        rebuilds_s = record["num_layers"] * median(record, "kv_gen_s")
        longer = max(median(record, "loads_s"), rebuilds_s)
        record["efficiency"] = median(record, "both_s") / longer
        stage.add(record.pop("kind"), **record)
        stage.figure("acts_overlap", round(record["efficiency"], 4))
        for name in ("kv_gen_s", "load_act_s", "load_kv_s"):
            stage.figure(f"{name[:-2]}_ms", round(1e3 * median(record, name), 4))
