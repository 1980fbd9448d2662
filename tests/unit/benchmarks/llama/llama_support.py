"""Small settings, played servers and made-up cells of the comparison."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec

PAGE = 16
TOKENS = 64
POOL = 160


def folder_of_model(path: Path, **config: object) -> Path:
    """Write what is read of a model's folder."""
    path.mkdir(parents=True, exist_ok=True)
    told = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 500,
        "max_position_embeddings": 4096,
        **config,
    }
    (path / "config.json").write_text(json.dumps(told))
    (path / "model.safetensors").write_bytes(b"0" * 1000)
    return path


def small_sizes(parts):
    """Return sizes that a played server answers at once."""
    shape = parts.settings.LoadShape(64, 16, 4, per_group=2, turns=1, concurrency=2)
    return dataclasses.replace(
        parts.settings.DRY,
        lengths=(TOKENS,),
        hits=3,
        disk_hits=2,
        gate_prompts=2,
        stream_prompts=3,
        shared_prefix=shape,
    )


def shared(parts, **changes):
    """Return what all systems have in common."""
    values = {
        "page_size": PAGE,
        "pool_tokens": 4096,
        "mem_fraction": 0.8,
        "attention_backend": "",
        "host_gb": 0,
        "disk_gb": 1,
    }
    return parts.settings.Shared(**(values | changes))


def header_of(parts, path, **changes):
    """Return a header as a run makes it."""
    model = parts.settings.Model.of(folder_of_model(path))
    told = parts.settings.header(
        model, shared(parts), parts.settings.DRY, ["plain"], dry_run=True
    )
    return told | changes


class PlayedServer:
    """A cache of prompts on the device, the host and a disk, least recent out."""

    def __init__(self, name: str, pool_tokens: int = POOL) -> None:
        flags = ("tiered",) if name.startswith("tiered") else ()
        self.spec = ServerSpec(name, Path("model"), flags)
        self.pool_tokens = pool_tokens
        self.pid = None
        self.device: list[tuple[int, ...]] = []
        self.below: list[tuple[int, ...]] = []
        self.looks = 0
        self.is_running = False

    @property
    def url(self) -> PlayedServer:
        """Itself: the played client asks it directly."""
        return self

    def exit_code(self) -> None:
        return None

    def flush_cache(self, timeout_s: float = 0.0) -> None:
        self.device.clear()
        if not self.spec.name.endswith("disk"):
            self.below.clear()

    def get(self, path: str) -> list[dict[str, object]]:
        assert path == "/tiered/stats"
        # Its last offload ends at the fourth look.
        self.looks += 1
        return [{"edges": {"device->host": {"bytes": 10 * min(self.looks, 4)}}}]

    def post(self, path: str, body: object) -> None:
        if self.is_running:
            # Its last request ends shortly after the last answer.
            self.is_running = False
            raise RuntimeError(f"{path}: HTTP 409: Requests are running")
        if path.endswith("tier=device"):
            self.device.clear()

    def answer(self, request, order: int, wishes=None) -> RequestRecord:
        """Answer what depends on the prompt alone, and say where it was found."""
        prompt = request.prompt
        self.is_running = True
        tier = "device" if prompt in self.device else ""
        if not tier and prompt in self.below:
            tier = "host"
            if self.spec.name.endswith("disk"):
                tier = "disk" if self.spec.name == "tiered-disk" else "storage"
        if prompt in self.device:
            self.device.remove(prompt)
        self.device.append(prompt)
        while sum(len(one) for one in self.device) > self.pool_tokens:
            self.device.pop(0)
        if not self.spec.name.startswith("plain") and prompt not in self.below:
            self.below.append(prompt)
        cached = (len(prompt) - 1) // PAGE * PAGE if tier else 0
        num = request.max_new_tokens
        token = sum(prompt) % 97
        return RequestRecord(
            key=request.key,
            order=order,
            prompt=prompt,
            targeted_s=0.0,
            started_s=0.0,
            token_times_s=tuple(
                {"": 2.0, "device": 0.1, "host": 0.5, "disk": 0.9, "storage": 0.9}[tier]
                + n / 100
                for n in range(num)
            ),
            output=(token,) * num,
            logprobs=(-0.1,) * num,
            top_logprobs=(((-0.1 - token / 10, token), (-9.0, 98)),) * num,
            cached_tokens=cached,
            cached_by_tier={tier: cached} if tier else {},
        )


def request(state: str, prompt: int, ttft_s: float, tier: str = "", output=(1, 2)):
    """Return one request of a cell."""
    return {
        "state": state,
        "prompt": prompt,
        "ttft_s": ttft_s,
        "e2e_s": ttft_s,
        "cached_tokens": TOKENS if tier else 0,
        "cached_by_tier": {tier: TOKENS} if tier else {},
        "output": list(output),
    }


MEMORY = {
    "pool_tokens": 4096,
    "pool_gib": 0.5,
    "weights_gib": 15.0,
    "graphs_gib": 0.1,
    "host_gb": 34,
    "disk": "",
    "attention_backend": "fa3",
    "page_size": 16,
    "mem_fraction": 0.8,
    "start_s": 30.0,
    "flags": [],
}


def cell(system: str, part: str, start: int = 0, case: int = 0, **found: object):
    """Return a finished cell."""
    told = {"system": system, "part": part, "start": start, "case": case}
    told |= {"status": "ok", "why": "", "date": "2026-01-02", "failed": []}
    return {**told, "memory": MEMORY, **found}


def ttft_cell(system: str, below_s: float, start: int = 0, wrong: int = 0):
    """Return six hits after one that does not count; some have another answer."""
    tier = "" if system == "plain" else "host"
    state = "host" if tier else "computed"
    seen = [request("warm-up", 0, 9.0)]
    seen += [request("computed", n, 2.0 + n / 100) for n in range(1, 6)]
    seen += [request("warm-up", 0, 9.0, tier), request("warm-up", 0, 9.0, "device")]
    for n in range(6):
        output = (9, 9) if n < wrong else (1, 2)
        seen.append(request(state, n, below_s + n / 1000, tier, output))
        seen.append(request("device", n, 0.1, "device"))
    return cell(system, "ttft", start, TOKENS, hit_tokens=TOKENS, requests=seen)


def stream_cell(system: str, start: int, seconds: float, drain_s: float = 0.0):
    """Return a stream without reuse."""
    moved = {"device->host": 5_000_000} if system == "tiered" else {}
    return cell(
        system,
        "noreuse",
        start,
        seconds=seconds,
        drain_s=drain_s,
        tokens=100,
        ttft_s=[1.0],
        outputs=[[1], [2]],
        moved_bytes=moved,
    )


def load_cell(system: str, start: int, repeat: int, answers: list[str]):
    """Return a load."""
    return cell(
        system,
        "shared_prefix",
        start,
        repeat,
        groups=2,
        figures={"output_throughput": 50.0 + 10 * start + repeat},
        ttfts=[0.1, 0.2, 0.3, 0.4, 0.5],
        cache_report={
            "total_prompt_tokens": 100,
            "total_cached_tokens": 60,
            "device_cached_tokens": 20,
            "host_cached_tokens": 40,
        },
        answers=answers,
    )


def all_cells():
    """Return cells of two systems, started twice."""
    cells = []
    for start in (0, 1):
        cells.append(ttft_cell("plain", 2.0, start))
        cells.append(ttft_cell("tiered", 0.5 + start / 100, start, wrong=3))
        cells.append(stream_cell("plain", start, 1.0))
        cells.append(stream_cell("tiered", start, 1.15 + 0.05 * start, drain_s=0.1))
        for repeat in (0, 1):
            cells.append(load_cell("plain", start, repeat, ["a", "b"]))
            cells.append(load_cell("tiered", start, repeat, ["a", "c"]))
    return cells
