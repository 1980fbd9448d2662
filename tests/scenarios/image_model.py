"""A tiny Qwen2-VL with random weights and a tokenizer of its own, for image prompts.

``python -m tests.scenarios.image_model FOLDER``
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["IMAGE", "make_image_model"]

MORE_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Stands for one image in a prompt's text."""


def make_image_model(folder: Path) -> None:
    """Write the model, its tokenizer and its processor into an empty folder.

    In a process of its own: with all that transformers loads for images, Python's end
    is a segmentation fault under pytest.
    """
    command = (sys.executable, "-m", "tests.scenarios.image_model", str(folder))
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)


def _write(folder: Path) -> None:
    import torch
    from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS, train_tokenizer
    from transformers import AutoTokenizer, Qwen2VLConfig
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        Qwen2VLImageProcessor,
    )
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VLForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import (
        Qwen2VLVideoProcessor,
    )

    train_tokenizer(folder, 4096, more_tokens=MORE_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MORE_TOKENS))
    text = {
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "rope_theta": 10000.0,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2}
    # By this name in real models' files, and read by SGLang; transformers has another.
    vision["in_chans"] = 3
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # As large as needed for tokens that hang on what came before.
                if weight.dim() == 2 and "norm" not in name:
                    weight.normal_(0.0, 1.5 / float(weight.shape[1]) ** 0.5)
        model.save_pretrained(folder)
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
