"""Changes weights through SGLang's own updater over its tree; prints what was found.

    weights_program.py FOLDER

A rank's tiers as the factory builds them, over a pool of SGLang's, under our tree. The
model is a module of two weights; SGLang's manager of weight updates runs with the
plugin's hooks around it, and with a runner that fills the module. KV is never looked
at: the program shows under which weights it would be found. A story may stop the server
and start another on the same FOLDER. The last line is JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from runtime_program import context  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.draining import drain  # noqa: E402

PAGE, NUM_PAGES, PROMPT_PAGES = 16, 32, 4
PATIENCE_S = 30.0
LORA_ID = "ab" * 16


def adapter(value: float) -> Any:
    """Return the part of SGLang's ``LoRAAdapter`` that an adapter is known by."""
    return SimpleNamespace(
        config=SimpleNamespace(r=2, target_modules=["q_proj"]),
        scaling=1.0,
        layers=[SimpleNamespace(weights={"q_proj.lora_A": torch.full((2, 4), value)})],
        embedding_layers={},
        added_tokens_embeddings={},
    )


class Runner:
    """SGLang's runner, as far as updates of weights go through it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weight_updater = self

    def fill(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)
            self.model.bias.zero_()

    def update_weights_from_disk(self, path: str, *args: Any, **kw: Any) -> Any:
        if path == "broken":
            self.fill(99.0)
            return False, "half of it was loaded"
        self.fill(float(path))
        return True, "updated"

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        self.fill(float(recv_req.zmq_handles["value"]))
        return True, "updated"

    def update_weights_from_tensor(self, *, named_tensors: Any, **kw: Any) -> Any:
        self.fill(float(named_tensors))
        return True, "updated"

    def receive_weights_from_distributed(self, *, names: Any, **kw: Any) -> Any:
        return names

    def load_weights_from_distributed(self, weights: Any) -> Any:
        self.fill(float(weights[0]))
        return True, "updated"

    def begin_weight_update(self) -> None:
        """Nothing is packed."""

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Nothing is packed."""

    def check_weights(self, *, action: str, **kw: Any) -> None:
        if action == "reset_tensors":
            self.fill(-7.0)


class Server:
    """One server's rank, from its start to its end."""

    def __init__(
        self, disk: Path, value: float, lora: Any = None, **settings: Any
    ) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.engines.sglang.cache import TieredRadixCache
        from sgl_tiered.engines.sglang.factory import _build_runtime
        from sgl_tiered.serving.option_reader import read_options

        ctx = context()
        self.runner = Runner(ctx.tp_worker.model_runner.model)
        self.runner.fill(value)
        if lora is not None:
            ctx.tp_worker.model_runner.lora_manager = SimpleNamespace(
                loras={LORA_ID: lora}
            )
        self.kv = ctx.params.token_to_kv_pool_allocator.get_kvcache()
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.kv,
            need_sort=False,
        )
        config = read_options(
            {
                "host_size": "4MB",
                "disk_path": str(disk),
                "disk_size": "64MB",
                "disk_admission": "all",
                "disk_io": "threads",
                "load_policy": "always",
                **settings,
            }
        )
        self.runtime = _build_runtime(ctx, config)
        if self.runtime.parts.adoption is not None:
            self.runtime.parts.adoption.finish()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = TieredRadixCache(params, self.runtime)
        # SGLang's scheduler and its manager, without a process around them.
        self.updater = object.__new__(SchedulerWeightUpdaterManager)
        for name, what in {
            "tp_worker": SimpleNamespace(
                model_runner=self.runner,
                weight_update_runners=lambda: [("target", self.runner)],
                deserialize_own_rank=lambda sent: sent,
            ),
            "draft_worker": None,
            "memory_saver_adapter": SimpleNamespace(
                pause=self.memory, resume=self.memory
            ),
            "flush_cache": self.flush,
            "is_fully_idle": lambda **kw: True,
            "scheduler": SimpleNamespace(
                tree_cache=self.tree,
                _engine_paused=False,
                disaggregation_mode=None,
                record_weight_version_change=lambda new_version: None,
            ),
            "metrics_collector": None,
            "offload_tags": set(),
            "stashed_model_static_state": None,
            "_session": None,
            "tp_cpu_group": torch.distributed.group.WORLD,
        }.items():
            setattr(self.updater, name, what)
        self.requests = 0
        self.paused: list[str] = []

    def memory(self, tag: str) -> None:
        """Note what SGLang's saver of memory released or brought back."""
        self.paused.append(tag)

    def flush(self, empty_cache: bool = True) -> bool:
        """Flush as SGLang's scheduler does where nothing runs."""
        del empty_cache
        self.tree.reset()
        self.allocator.clear()
        return True

    def update(self, value: float, *, flush: bool, path: str | None = None) -> bool:
        """``POST /update_weights_from_disk``."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        asked = UpdateWeightFromDiskReqInput(
            model_path=path or str(value), flush_cache=flush
        )
        return bool(self.updater.update_weights_from_disk(asked).success)

    def settle(self) -> None:
        """Let what is under way end: copies, writes, the reading of weights."""
        reading = self.runtime.weights._reading
        if reading is not None:
            assert reading._done.wait(PATIENCE_S)
        for _ in range(6):
            drain(self.runtime)
            self.tree.check_hicache_events()

    def key(self, tokens: Any, extra_key: str | None = None) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), extra_key)

    def compute(self, tokens: Any, extra_key: str | None = None) -> None:
        """Serve a prompt: its KV comes to the tree and is offloaded, as it is due."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        key = self.key(tokens, extra_key)
        self.tree.insert(InsertParams(key=key, value=slots))
        root = self.tree.root_node_handle(extra_key)
        num, node, _ = self.tree.tree_core.match_full_device_prefix(key)
        rows = self.tree.tree_core.collect_full_device_indices(node, root)[:num]
        self.requests += 1
        self.tree.req_to_token_pool = SimpleNamespace(
            req_to_token=rows.to(torch.int32)[None]
        )
        self.tree._offload(
            SimpleNamespace(
                rid=str(self.requests),
                extra_key=extra_key,
                cache_salt=None,
                full_untruncated_fill_ids=array("q", tokens.tolist()),
                kv=SimpleNamespace(req_pool_idx=0),
                last_node=node,
                finished=lambda: True,
            ),
            None,
            len(tokens),
        )
        self.settle()

    def found(self, tokens: Any, extra_key: str | None = None) -> int | None:
        """Return the prompt's pages that the tiers would load; None: nobody asks."""
        digest = self.runtime.namespace(extra_key, None)
        if digest is None:
            return None
        longer = np.concatenate([tokens, tokens[:1]])
        return int(self.runtime.cache.lookup(digest, longer, 0).num_found)

    def stop(self) -> None:
        self.settle()
        self.runtime.close(self.runtime.pump)


class Program:
    """The stories, each from an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(1)
        shape = (3, PROMPT_PAGES * PAGE)
        self.tokens, self.others, self.more = rng.integers(1000, size=shape).astype(
            np.int32
        )
        self.told: dict[str, Any] = {}

    def start(self, value: float, **settings: Any) -> Server:
        return Server(self.folder, value, **settings)

    def run(self) -> dict[str, Any]:
        for story in (
            self.flushed_first,
            self.updated_and_restarted,
            self.not_flushed,
            self.not_flushed_and_the_same,
            self.in_a_session,
            self.by_every_way,
            self.failed,
            self.released,
            self.waiting,
            self.put_off,
            self.adapters,
            self.adapter_while_it_runs,
            self.of_other_instances,
        ):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.told[story.__name__] = story()
        return self.told

    def flushed_first(self) -> Any:
        """Flush, then update without one, compute, restart with the weights before."""
        server = self.start(1.0)
        server.compute(self.others)
        server.flush()
        server.update(2.0, flush=False)
        server.settle()
        server.compute(self.tokens)
        told = {"by the new": server.found(self.tokens)}
        server.stop()
        server = self.start(1.0)
        told["by the old after a restart"] = server.found(self.tokens)
        server.stop()
        return told

    def updated_and_restarted(self) -> Any:
        """Update as a trainer does, compute, restart with the updated weights."""
        server = self.start(1.0)
        server.compute(self.others)
        server.update(2.0, flush=True)
        told = {"at once": server.found(self.others)}
        server.settle()
        told["of the old"] = server.found(self.others)
        server.compute(self.tokens)
        server.stop()
        server = self.start(2.0)
        told["after a restart"] = server.found(self.tokens)
        server.stop()
        return told

    def not_flushed(self) -> Any:
        """SGLang keeps its device: what it has goes nowhere until it is flushed."""
        server = self.start(1.0)
        server.compute(self.tokens)
        server.update(2.0, flush=False)
        server.settle()
        told = {
            "mixed": server.runtime.weights.is_mixed,
            "before a flush": server.found(self.tokens),
            "used": server.runtime.cache.stats.pages_stored[1],
        }
        # A longer prompt, upon what the device has of the old weights.
        server.compute(np.concatenate([self.tokens, self.others]))
        told["still used"] = server.runtime.cache.stats.pages_stored[1]
        told["skipped"] = server.runtime.metrics.snapshot()["counters"][
            "offloads_weights_unsettled"
        ]
        server.flush()
        server.compute(self.more)
        told["after a flush"] = [server.found(self.tokens), server.found(self.more)]
        server.stop()
        server = self.start(2.0)
        told["restarted"] = [server.found(self.tokens), server.found(self.more)]
        server.stop()
        return told

    def not_flushed_and_the_same(self) -> Any:
        """The weights that were loaded are those that were there."""
        server = self.start(1.0)
        server.compute(self.tokens)
        server.update(1.0, flush=False)
        told = {"at once": server.found(self.tokens)}
        server.settle()
        told["read"] = server.found(self.tokens)
        server.compute(self.others)
        told["goes on"] = server.found(self.others)
        server.stop()
        return told

    def in_a_session(self) -> Any:
        """Tensors in two parts: known only once SGLang says that it is over."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        server = self.start(1.0)
        server.compute(self.tokens)
        told = {}

        def part(value: bytes, *, flush: bool) -> bool:
            asked = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[value], flush_cache=flush
            )
            # Our runner takes the text; SGLang's takes what it stands for.
            asked.serialized_named_tensors = value.decode()  # type: ignore[assignment]
            return bool(server.updater.update_weights_from_tensor(asked).success)

        told["refused"] = part(b"2.0", flush=True)
        told["unchanged"] = server.found(self.tokens)
        server.updater.begin_weight_update(BeginWeightUpdateReqInput(selector="all"))
        told["begun"] = server.found(self.tokens)
        part(b"2.0", flush=False)
        server.settle()
        part(b"3.0", flush=True)
        server.settle()
        told["within"] = server.found(self.tokens)
        server.updater.end_weight_update(EndWeightUpdateReqInput())
        server.settle()
        told["over"] = server.found(self.tokens)
        server.compute(self.others)
        server.stop()
        for value in (3.0, 2.0):
            server = self.start(value)
            told[f"restarted with {value}"] = server.found(self.others)
            server.stop()
        return told

    def by_every_way(self) -> Any:
        """Whatever of SGLang's may change weights is noticed."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            CheckWeightsReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromDistributedReqInput,
            UpdateWeightsFromIPCReqInput,
        )

        server = self.start(1.0)
        updater, told = server.updater, {}

        def tried(name: str, change: Any) -> None:
            server.flush()
            server.compute(self.tokens)
            kept = server.found(self.tokens)
            change()
            server.settle()
            told[name] = [kept, server.found(self.tokens)]

        def distributed() -> None:
            updater.begin_weight_update(BeginWeightUpdateReqInput(selector="all"))
            updater.update_weights_from_distributed(
                UpdateWeightsFromDistributedReqInput(
                    names=["5.0"], dtypes=["float32"], shapes=[[1]], flush_cache=False
                )
            )
            updater.end_weight_update(EndWeightUpdateReqInput())

        def ipc() -> None:
            asked = UpdateWeightsFromIPCReqInput(
                zmq_handles={"value": "6.0"}, flush_cache=False
            )
            updater.update_weights_from_ipc(asked)

        def remote() -> None:
            updater.begin_weight_update(BeginWeightUpdateReqInput(selector="all"))
            server.runner.fill(7.0)
            updater.end_weight_update(EndWeightUpdateReqInput())

        def check(action: str) -> None:
            updater.check_weights(CheckWeightsReqInput(action=action))

        tried("distributed", distributed)
        tried("ipc", ipc)
        tried("written by a peer in a session", remote)
        tried("overwritten by a check", lambda: check("reset_tensors"))
        tried("a check that only looks", lambda: check("snapshot"))
        server.stop()
        return told

    def failed(self) -> Any:
        """An update that broke off half way has changed the weights, too."""
        server = self.start(1.0)
        server.compute(self.tokens)
        told = {"success": server.update(0.0, flush=True, path="broken")}
        server.settle()
        told["found"] = server.found(self.tokens)
        server.stop()
        return told

    def released(self) -> Any:
        """Weights that are away are not read, whatever is flushed meanwhile."""
        from sglang.srt.managers.io_struct import (
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        server = self.start(1.0)
        server.compute(self.tokens)
        weights = server.runtime.weights
        read = weights._begin
        reads = []

        def begin() -> Any:
            reads.append(list(server.paused))
            return read()

        weights._begin = begin
        release = ReleaseMemoryOccupationReqInput(tags=["weights"])
        resume = ResumeMemoryOccupationReqInput(tags=["weights"])
        server.updater.release_memory_occupation(release)
        told = {"away": server.found(self.tokens)}
        server.updater.resume_memory_occupation(resume)
        server.settle()
        told["back"] = server.found(self.tokens)
        server.updater.release_memory_occupation(release)
        server.flush()
        told["flushed"] = server.found(self.tokens)
        server.updater.resume_memory_occupation(resume)
        server.settle()
        server.compute(self.others)
        told["back again"] = [server.found(self.tokens), server.found(self.others)]
        # What had been released and brought back when each read began.
        told["reads"] = reads
        server.updater.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=["cuda_graph"])
        )
        told["others' memory"] = server.found(self.others)
        server.stop()
        return told

    def waiting(self) -> Any:
        """A request that waits with a plan of the old weights computes its prompt."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        server = self.start(1.0)
        server.compute(self.tokens)
        server.tree.drop(_tier("DEVICE"))
        req = SimpleNamespace(
            rid="waits",
            extra_key=None,
            cache_salt=None,
            sampling_params=None,
            session=None,
            positional_embed_overrides=None,
            _compute_max_prefix_len=lambda num_tokens: len(self.tokens),
        )
        longer = np.concatenate([self.tokens, self.tokens[:1]])
        # SGLang leaves the last token out, which is computed.
        params = MatchPrefixParams(key=server.key(longer)[: len(self.tokens)], req=req)

        def matched() -> int:
            return int(server.tree.match_prefix(params).host_hit_length)

        told: dict[str, Any] = {"before": matched()}
        assert server.tree.waiting_request("waits") is not None
        gate = threading.Event()
        weights = server.runtime.weights
        begin = weights._begin

        def held() -> Any:
            read = begin()

            def wait_and_read(*args: Any) -> Any:
                assert gate.wait(PATIENCE_S)
                return read(*args)

            return wait_and_read

        weights._begin = held
        server.update(2.0, flush=False)
        server.tree.check_hicache_events()
        told["while they are read"] = matched()
        told["a state is left"] = server.tree.waiting_request("waits") is not None
        told["goes at once"] = server.tree.check_prefetch_progress(req)
        gate.set()
        server.settle()
        told["after"] = matched()
        pinned = server.runtime.cache.occupancy(_tier("HOST")).pinned_slots
        told["pinned"] = pinned
        server.stop()
        return told

    def put_off(self) -> Any:
        """What was to be copied later is not: the device may have other KV by then."""
        server = self.start(1.0, write_policy="on-evict", offload_threshold=0.1)
        ahead = server.tree._ahead
        assert ahead is not None
        advance, ahead.advance = ahead.advance, lambda: None
        server.compute(self.tokens)
        server.update(2.0, flush=False)
        ahead.advance = advance
        server.settle()
        stored = server.runtime.cache.stats.pages_stored[1]
        server.flush()
        server.compute(self.tokens)
        server.settle()
        told = {"of the old": stored, "of the new": server.found(self.tokens)}
        server.stop()
        return told

    def adapters(self) -> Any:
        """The adapter under one id was trained anew between two starts."""
        server = self.start(1.0, lora=adapter(1.0))
        key = "user" + LORA_ID
        server.compute(self.tokens, key)
        told: dict[str, Any] = {"served": server.found(self.tokens, key)}
        server.stop()
        server = self.start(1.0, lora=adapter(1.0))
        told["the same"] = server.found(self.tokens, key)
        told["without it"] = server.found(self.tokens, "user")
        server.stop()
        server = self.start(1.0, lora=adapter(2.0))
        told["trained anew"] = server.found(self.tokens, key)
        server.stop()
        return told

    def adapter_while_it_runs(self) -> Any:
        """It was put aside and loaded anew under its id, trained on meanwhile."""
        from sglang.srt.managers.scheduler import Scheduler

        key = "user" + LORA_ID
        server = self.start(1.0, lora=adapter(1.0), write_policy="on-evict")
        loras = server.runtime.adapters._manager.loras
        scheduler = SimpleNamespace(
            tree_cache=server.tree,
            tp_worker=SimpleNamespace(
                load_lora_adapter=lambda asked: SimpleNamespace(success=True),
                unload_lora_adapter=lambda asked: SimpleNamespace(success=True),
            ),
            kv_event_lora_names=SimpleNamespace(register=lambda **names: None),
        )
        asked = SimpleNamespace(lora_id=LORA_ID, lora_name="one")

        def load(value: float) -> None:
            del loras[LORA_ID]
            Scheduler.unload_lora_adapter(scheduler, asked)
            loras[LORA_ID] = adapter(value)
            Scheduler.load_lora_adapter(scheduler, asked)

        def put_off() -> int:
            assert server.tree._ahead is not None
            return len(server.tree._ahead._deferred)

        server.compute(self.tokens, key)
        told: dict[str, Any] = {"put off": put_off()}
        load(1.0)
        told["the same"] = [server.found(self.tokens, key), put_off()]
        load(2.0)
        # A longer prompt, upon what the device has of the former.
        server.compute(np.concatenate([self.tokens, self.others]), key)
        told["trained on"] = [server.found(self.tokens, key), put_off()]
        told["others"] = server.found(self.tokens, "user")
        server.flush()
        told["flushed"] = server.found(self.tokens, key)
        server.compute(self.tokens, key)
        told["computed anew"] = put_off()
        server.stop()
        return told

    def of_other_instances(self) -> Any:
        """A decode server gets KV of a prefill server, and its own back from memory."""
        from sgl_tiered.engines.sglang.disagg.decode import DecodeRadixCache
        from sgl_tiered.serving.disagg.figures import PrefillTold

        server = self.start(1.0)
        weights = server.runtime.weights
        told_by: dict[int, PrefillTold] = {}
        tree = SimpleNamespace(tiered=server.runtime, _prefill_of=told_by.get)
        kept, short = (SimpleNamespace(bootstrap_room=room) for room in (1, 2))
        others = SimpleNamespace(bootstrap_room=3)
        told_by[1] = told_by[2] = PrefillTold(*weights.told(), None)
        told_by[3] = PrefillTold("others", "epoch", None)

        def checkpoint(req: Any) -> bool:
            DecodeRadixCache._note_origin(tree, req)
            return bool(weights.settled)

        told = {"of the same": [checkpoint(req) for req in (kept, short, short)]}
        server.update(2.0, flush=True)
        server.settle()
        told["updated"] = weights.settled
        told["kept from before"] = [checkpoint(kept), weights.is_mixed]
        server.flush()
        told["flushed"] = weights.settled
        told["of others"] = [checkpoint(others), weights.is_mixed]
        server.stop()
        return told


def _tier(name: str) -> Any:
    from sgl_tiered.core.ids import TierId

    return TierId[name]


def main() -> None:
    """Attach the hooks, tell all stories."""
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.weight_hooks import _CHANGES, weight_hooks

    folder = Path(sys.argv[1])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=0, world_size=1
    )
    # It asks for SGLang's settings, which only a server publishes.
    manager = weight_updater.SchedulerWeightUpdaterManager
    manager._assert_weight_cache_inactive = lambda self, op: None
    # Released memory is waited for on the device that torch was built for.
    torch.cuda.synchronize = lambda *args: None
    for target, hook, kind in weight_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    told = Program(folder / "disk").run()
    told["methods"] = [name for name in dir(manager) if not name.startswith("_")]
    told["watched"] = list(_CHANGES)
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
