"""A calibration with every part measured, for the tests that read one."""

from sgl_tiered.cost.calibration import (
    Calibration,
    DecodeFit,
    FitQuality,
    LinkFit,
    MachineFacts,
    ModelFacts,
    PrefillFit,
)

QUALITY = FitQuality(6, 0.99, 0.01, 0.04)
CALIBRATION = Calibration(
    created="2026-01-01T00:00:00+00:00",
    method="server",
    engine="sglang 0.5.23",
    model=ModelFacts(
        name="demo",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        attention_backend="tiered_cpu",
        num_layers=4,
        attention_width=256,
        num_params=10**7,
        kv_bytes_per_token=2048,
        page_tokens=16,
        chunk_tokens=2048,
    ),
    machine=MachineFacts("none", 2, 8 * 10**9, "Linux"),
    prefill=PrefillFit(0.002, 1e-4, 1e-8, 1.4, QUALITY),
    decode=DecodeFit(0.004, 1e-3, 1e-7, QUALITY),
    request_overhead_s=0.005,
    links=(
        LinkFit("host", "device", 1e-4, 5e9, False, 1.1, QUALITY),
        LinkFit("disk", "host", 1e-3, 1e9, True, None, QUALITY),
    ),
)
