"""Has SGLang quantise a model in each way that it lists, and compute one prompt.

``quantised_program.py MODEL FILE``: FILE gets one JSON object, by kind: why SGLang did
not go on, or of which types the model's tensors are once it has computed. There is no
server: each kind has a fork of this process, which has imported SGLang before.
"""

import json
import os
import signal
import sys
from pathlib import Path

from sglang.benchmark import one_batch
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.server_args import PortArgs, prepare_server_args

PATIENCE_S = 240


def computed(model, kind):
    """Return the types of the model's tensors, once it has computed a prompt."""
    flags = ["--model-path", model, "--quantization", kind]
    flags += ["--page-size", "16", "--max-total-tokens", "1024"]
    args = prepare_server_args(flags)
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    tokens = [list(range(50, 90))]
    runner.extend(one_batch.prepare_synthetic_inputs_for_latency_test(1, 40, tokens))
    (loaded,) = (each for each in vars(runner).values() if hasattr(each, "model"))
    return sorted({str(each.dtype) for each in loaded.model.parameters()})


def tried(model, kind):
    """Return what came of a kind, from a process of its own."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            found = {"types": computed(model, kind)}
        except BaseException as error:  # noqa: BLE001 - SGLang exits by some of them
            found = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(told, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(told)
    with os.fdopen(heard) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "it ended without a word"}


if __name__ == "__main__":
    model, file = sys.argv[1:]
    found = {kind: tried(model, kind) for kind in QUANTIZATION_CHOICES}
    Path(file).write_text(json.dumps(found))
