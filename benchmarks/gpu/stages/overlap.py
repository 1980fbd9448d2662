"""The layer-wise load under a forward, and an offload beside one (``movement``)."""

from __future__ import annotations

from movement.overlap import measure_overlap
from movement.place import Place
from movement.stack import StackShape
from stages.figures import median
from stages.stage import Stage

__all__ = ["DRY_STACK", "run"]

DRY_STACK = StackShape(num_layers=4, hidden=64, intermediate=128, num_heads=2)
_REPEATS = 9
_LONG_S = 25.0
"""The longer prefix takes about so long, most of it to make and pin 2 GB of noise."""


def run(stage: Stage) -> None:
    """Write one record per way; raises AssertionError for another answer."""
    dry = stage.dry_run
    place = Place("cpu" if dry else "cuda")
    for tokens in (64,) if dry else (2048, 4096):
        if stage.left_s < (0.0 if tokens < 4096 else _LONG_S):
            stage.add("skipped", cached_tokens=tokens)
            continue
        for record in measure_overlap(
            place,
            DRY_STACK if dry else StackShape(),
            page_tokens=16,
            cached_tokens=tokens,
            new_tokens=16 if dry else 2048,
            repeats=2 if dry else _REPEATS,
        ):
            kind = record.pop("kind")
            record["efficiency"] = _efficiency(record)
            record["beside_offload"] = median(record, "forward_beside_offload_s") / (
                median(record, "forward_s")
            )
            stage.add(kind, **record)
            name = f"{record['way']}_{tokens}"
            stage.figure(f"overlap_{name}", round(record["efficiency"], 4))
            stage.figure(
                f"forward_beside_offload_{name}", round(record["beside_offload"], 4)
            )


def _efficiency(record: dict[str, object]) -> float:
    """Return both over max(forward, load) plus the first layer's load; 1 is ideal."""
    longer = max(median(record, "forward_s"), median(record, "load_s"))
    return median(record, "both_s") / (longer + median(record, "first_layer_s"))
