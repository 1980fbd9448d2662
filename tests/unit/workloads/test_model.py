"""Models are made once, alike each time, and depend on what they claim to."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sgl_tiered_workloads import model as model_module
from sgl_tiered_workloads.model import PRESETS, main, make_model
from sgl_tiered_workloads.tokenizer import SPECIAL_TOKENS, VOCAB_TOKENS

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    return make_model("tiny", cache)


def test_a_made_model_is_taken_from_the_cache(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call writes nothing and returns the same folder."""
    monkeypatch.setattr(model_module, "_write_weights", None)
    assert make_model("tiny", cache) == tiny


def test_the_same_preset_gives_the_same_bytes_elsewhere(
    tiny: Path, tmp_path: Path
) -> None:
    """Weights and tokenizer are functions of preset and Python version."""
    again = make_model("tiny", tmp_path)
    assert again.name == tiny.name
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes(), name


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the tokenizer out: training it is most of a tiny model's time."""

    def no_tokenizer(folder: Path, max_positions: int) -> None:
        (folder / "tokenizer.json").write_text(str(max_positions))

    monkeypatch.setattr(model_module, "train_tokenizer", no_tokenizer)


@pytest.mark.usefixtures("quick")
def test_another_scale_or_seed_is_another_model(tiny: Path, tmp_path: Path) -> None:
    """Whatever shapes the weights is part of the folder's name."""
    small = replace(PRESETS["tiny"], num_layers=1)
    names = {
        make_model(shape, tmp_path).name
        for shape in (small, replace(small, seed=1), replace(small, mlp_gain=0.25))
    }
    assert len(names | {tiny.name}) == 4


@pytest.mark.usefixtures("quick")
def test_concurrent_makers_leave_one_whole_model(tmp_path: Path) -> None:
    """Whoever is first wins; nothing half-made and nothing temporary stays."""
    small = replace(PRESETS["tiny"], num_layers=1)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: make_model(small, tmp_path), range(3)))
    assert len(set(made)) == 1
    assert list(tmp_path.iterdir()) == [made[0]]
    assert (made[0] / "model.safetensors").exists()
    # They have left it at bfloat16, for all that came after in the process.
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("quick")
def test_a_failed_maker_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maker that fails half-way leaves no folder that looks like a model."""

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(model_module, "_write_weights", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        make_model("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_round_trips_text_and_has_a_chat_template(tiny: Path) -> None:
    """Byte-level BPE loses nothing; chats open with the special tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == VOCAB_TOKENS
    assert tokenizer.convert_ids_to_tokens(list(range(7))) == list(SPECIAL_TOKENS)
    text = "def f(x):\n\treturn 'naïve ☃' + str(x)\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|bos|><|user|>\nhi<|end|>\n<|assistant|>\n"


def test_the_bench_model_has_about_40_million_parameters() -> None:
    """The bench preset is the size that the benches state."""
    shape = PRESETS["bench"]
    assert (shape.num_layers, shape.hidden) == (12, 512)
    assert (shape.num_heads, shape.num_kv_heads) == (8, 4)
    assert shape.kv_bytes_per_token == 12288
    config = model_module._config(shape)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert 38e6 < sum(p.numel() for p in made.parameters()) < 43e6


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("preset", ["tiny", "opt-tiny", "qwen2-tiny", "mistral-tiny"])
def test_one_early_page_moves_the_answer(tmp_path: Path, preset: str) -> None:
    """Exchanging a page 500 tokens back moves top-5 logprobs far above rounding."""
    folder = make_model(preset, tmp_path)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 8192
    made = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16
    )
    generator = np.random.default_rng(0)
    moves = []
    for _ in range(3):
        prompt = generator.integers(7, VOCAB_TOKENS, 600)
        wrong = prompt.copy()
        wrong[64:80] = generator.integers(7, VOCAB_TOKENS, 16)
        with torch.no_grad():
            logits = made(torch.tensor(np.stack([prompt, wrong]))).logits[:, -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        best = logprobs[0].topk(5).indices
        moves.append(float((logprobs[0, best] - logprobs[1, best]).abs().max()))
    # bfloat16 rounding moves these by about 0.05 (see model.py).
    assert min(moves) > 0.2, moves


def test_the_command_prints_the_folder(
    cache: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line makes the model and says where it is."""
    assert main(["--preset", "tiny", "--out", str(cache)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny)
