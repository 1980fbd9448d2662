"""Measures links without a server: memory copies, and our disk tier in a folder.

What computes is not there, so neither prefill nor decode is measured; and the copies
run alone, where a server's share cores and memory with its model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import PageRecords, TransferResult
from sgl_tiered.cost.calibration import ModelFacts
from sgl_tiered.cost.fitting import LinkSample
from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.host import HostTier

__all__ = [
    "layout_of",
    "measure_copies",
    "measure_disk",
    "projection_of_config",
    "read_model_config",
]

_PAGES = (1, 8, 32, 96)
_MOST_BYTES = 256 * 2**20
_REPEATS = 5
_INDEX_BYTES_PER_SLOT = 4096
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Samples = dict[tuple[str, str], list[LinkSample]]


def read_model_config(folder: Path, page_tokens: int, kv_dtype: str) -> ModelFacts:
    """Read what ``config.json`` of a model says.

    Args:
        folder: of the model.
        page_tokens: tokens in a page.
        kv_dtype: of the KV pool; ``auto`` for that of the weights.

    Raises:
        ConfigError: the file cannot be read, or says too little.
    """
    path = folder / "config.json"
    remedy = "give the folder of a Hugging Face model"
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
        architecture = str(raw["architectures"][0])
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    except OSError as error:
        raise ConfigError(
            "--model", f"{path} cannot be read ({error.strerror})", remedy
        ) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            "--model", f"{path} is not understood ({error!r})", remedy
        ) from None
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    if kv_dtype not in _ITEM_BYTES:
        raise ConfigError(
            "--kv-dtype", f"{kv_dtype!r} is unknown", f"use {', '.join(_ITEM_BYTES)}"
        )
    sizes = (layers, heads, kv_heads, head_dim, page_tokens)
    if min(sizes) < 1:
        raise ConfigError("--model", f"{path} has a size below 1 {sizes}", remedy)
    return ModelFacts(
        name=folder.resolve().name,
        architecture=architecture,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention_backend="",
        num_layers=layers,
        attention_width=heads * head_dim,
        num_params=None,
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * _ITEM_BYTES[kv_dtype],
        page_tokens=page_tokens,
        chunk_tokens=None,
    )


def projection_of_config(folder: Path) -> dict[str, Any] | None:
    """Return the projection of K and V by ``config.json``, as a server would tell it.

    Args:
        folder: of a model that ``read_model_config`` has read.

    Returns:
        The shape on one rank, and the threads of this process; None where K and V are
        not plain heads (latent attention).
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "kv_lora_rank" in raw or "hidden_size" not in raw:
        return None
    heads = int(raw["num_attention_heads"])
    return {
        "hidden": int(raw["hidden_size"]),
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        "has_rotary": any(key.startswith(("rope", "rotary")) for key in raw),
        "has_bias": any(
            bool(raw.get(key)) for key in ("attention_bias", "enable_bias", "qkv_bias")
        ),
        "num_threads": len(os.sched_getaffinity(0)),
    }


def layout_of(model: ModelFacts) -> PageLayout:
    """Return the shape of a page of this model."""
    token_bytes = model.kv_bytes_per_token // (2 * model.num_layers)
    return PageLayout(model.num_layers, model.page_tokens, token_bytes)


def measure_copies(layout: PageLayout, clock: Clock) -> Samples:
    """Time copies between two regions of memory, both ways.

    That is a link to the device only where the device is the CPU.
    """
    counts = _counts(layout)
    host = HostTier(layout.slot_bytes, counts[-1])
    device = np.ones((counts[-1], layout.slot_bytes), np.uint8)
    samples: Samples = {("host", "device"): [], ("device", "host"): []}
    try:
        # The first touch of a page is slower than any copy after it.
        host.region[:] = device
        for count in counts:
            num_bytes = count * layout.page_bytes
            for edge, target, source in (
                (("host", "device"), device, host.region),
                (("device", "host"), host.region, device),
            ):
                times = []
                for _ in range(_REPEATS):
                    started_s = clock.now()
                    target[:count, : layout.page_bytes] = source[
                        :count, : layout.page_bytes
                    ]
                    times.append(clock.now() - started_s)
                samples[edge].append(LinkSample(num_bytes, float(np.median(times))))
    finally:
        host.close()
    return samples


def measure_disk(layout: PageLayout, folder: Path) -> Samples:
    """Write and read pages by the disk tier in a new folder, which is removed.

    Raises:
        ConfigError: the folder cannot be used, or the disk fails.
    """
    counts = _counts(layout)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".sgl-tiered-calibrate-", dir=folder))
    except OSError as error:
        raise ConfigError(
            "--disk-path",
            f"{folder} cannot be used ({error.strerror})",
            "give a directory that this user may write to",
        ) from None
    host = HostTier(layout.slot_bytes, counts[-1])
    try:
        host.region[:] = 1
        disk = DiskTier.open(
            scratch,
            slot_bytes=layout.slot_bytes,
            page_bytes=layout.page_bytes,
            page_tokens=layout.page_tokens,
            max_bytes=2 * counts[-1] * (layout.slot_bytes + _INDEX_BYTES_PER_SLOT),
            fingerprint="calibrate",
        )
        try:
            return _disk_samples(layout, host, disk, counts)
        finally:
            disk.close()
    finally:
        host.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _disk_samples(
    layout: PageLayout, host: HostTier, disk: DiskTier, counts: list[int]
) -> Samples:
    samples: Samples = {("host", "disk"): [], ("disk", "host"): []}
    for count in counts:
        rows = np.arange(count, dtype=np.int64)
        records = PageRecords(
            namespaces=np.zeros((count, KEY_BYTES), np.uint8),
            keys=np.zeros((count, KEY_BYTES), np.uint8),
            parents=np.zeros((count, KEY_BYTES), np.uint8),
            tokens=np.zeros((count, layout.page_tokens), np.int32),
            checksums=np.zeros(count, np.uint64),
            addresses=rows,
        )
        written = [
            disk.store(TierIO(rows, host.region, rows, records))
            for _ in range(_REPEATS)
        ]
        read = [disk.load(TierIO(rows, host.region, rows)) for _ in range(_REPEATS)]
        samples["host", "disk"].append(_median(written))
        samples["disk", "host"].append(_median(read))
    return samples


def _median(results: list[TransferResult]) -> LinkSample:
    for result in results:
        if not result.ok.all():
            raise ConfigError(
                "--disk-path",
                f"the disk failed ({result.error or 'pages did not arrive'})",
                "free space or give another folder",
            )
    seconds = float(np.median([result.seconds for result in results]))
    return LinkSample(results[0].num_bytes, seconds)


def _counts(layout: PageLayout) -> list[int]:
    """Return how many pages to move at a time; at least one."""
    most = max(_MOST_BYTES // layout.slot_bytes, 1)
    return sorted({min(count, most) for count in _PAGES})
