"""Answers prompts on SGLang's offline engine and prints what came as JSON.

``engine_program.py MODEL JOB.json``; the job has ``engine`` (its arguments),
``prompts`` (token ids, in order) and ``max_new_tokens``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Run one job; the last line of stdout is the answer."""
    from sglang.srt.entrypoints.engine import Engine

    job = json.loads(Path(sys.argv[2]).read_text())
    engine = Engine(model_path=sys.argv[1], **job["engine"])
    answers = []
    try:
        for prompt in job["prompts"]:
            answer = engine.generate(
                input_ids=prompt,
                sampling_params={
                    "temperature": 0.0,
                    "max_new_tokens": job["max_new_tokens"],
                    "ignore_eos": True,
                },
                return_logprob=True,
                logprob_start_len=-1,
                top_logprobs_num=5,
            )
            meta = answer["meta_info"]
            answers.append(
                {
                    "output": answer["output_ids"],
                    "top": [
                        [[float(pair[0]), int(pair[1])] for pair in top]
                        for top in meta["output_top_logprobs"]
                    ],
                    "cached": meta["cached_tokens"],
                    "details": meta.get("cached_tokens_details"),
                }
            )
    finally:
        engine.shutdown()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
