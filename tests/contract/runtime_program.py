"""Builds a rank's tiers as the factory does, and prints what came as JSON.

``runtime_program.py SETTINGS.json``: a list of settings by flag name without
``--tiered-``, one after the other.
A pool of SGLang's and a module of two weights stand where SGLang would have a model.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")


def context() -> Any:
    """Return the part of SGLang's build context that the factory reads."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    size = 512
    pool = MHATokenToKVPool(
        size=size,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(
                architectures=["LlamaForCausalLM"], to_dict=lambda: {"layers": 3}
            ),
            dtype=torch.bfloat16,
            num_attention_heads=4,
            head_dim=16,
            vocab_size=100,
            context_len=2048,
        ),
        server_args=SimpleNamespace(
            resolved_dict=lambda: {
                "served_model_name": "tiny",
                "model_path": "tiny",
                "attention_backend": "tiered_cpu",
                "chunked_prefill_size": -1,
            },
        ),
        params=SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(
                get_kvcache=lambda: pool, size=size
            ),
            page_size=16,
        ),
        tp_group=None,
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(model=torch.nn.Linear(8, 8))
        ),
    )


def build(settings: dict[str, Any]) -> dict[str, Any]:
    """Build the tiers, describe them, close them."""
    from sgl_tiered.engines.sglang.factory import _build_runtime
    from sgl_tiered.serving.option_reader import read_options

    runtime = _build_runtime(context(), read_options(settings))
    parts = runtime.parts
    try:
        return {
            "stats": runtime.stats(),
            "namespace": runtime.namespace(None, None).hex(),
            "edges": [f"{a.label}->{b.label}" for a, b in parts.demoters],
            "memory": [tier.label for tier in parts.memory],
        }
    finally:
        runtime.close(runtime.pump)


def main() -> None:
    """Print one line of JSON behind everything else."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    print("\n" + json.dumps([build(each) for each in settings]))


if __name__ == "__main__":
    main()
