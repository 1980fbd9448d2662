# Every target sets up what it needs, from Python 3.11+ with pip; `make help` lists them.
#   ARGS="..."   is handed to the program or to pytest
#   RECORD=dir   keeps what was measured there as a file, such as benchmarks/results
#   TRACES=dir   holds the traces that some programs of bench-sim read
#   VENV=path    is the virtual environment, PYTHON=path the interpreter it is made with
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
ARGS ?=
RECORD ?=
TRACES ?=
PY := "$(VENV)/bin/python"
KEEP := $(if $(RECORD),--record "$(RECORD)")
BENCH := $(PY) scripts/recorded.py $(KEEP)
SAY := . scripts/say.sh; say
TEST := bash scripts/test.sh "$(VENV)"
# SGLang has thousands of modules: without written bytecode every process of every server
# compiles them again, which takes longer than all else.
unexport PYTHONDONTWRITEBYTECODE
export STARTED_AT := $(shell date +%s)
.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: install
install: ## make the virtual environment with SGLang, the plugin and the tools
	@bash scripts/install.sh "$(VENV)"

.PHONY: lock
lock: ## choose the newest versions that go together, and lock them with their hashes
	@rm -rf .cache/lock && UNLOCKED=1 bash scripts/install.sh .cache/lock
	@.cache/lock/bin/python scripts/lock.py >.cache/constraints.txt
	@mv .cache/constraints.txt scripts/constraints.txt && rm -rf .cache/lock
	@bash scripts/lock_hashes.sh

.PHONY: demo
demo: install ## plain SGLang against SGLang with tiers, on a model that we trained
	@$(SAY) demo "plain SGLang, then SGLang with tiers, on the same work (about 8 minutes)"
	@$(PY) benchmarks/serving/demo.py $(KEEP) $(ARGS)
	@$(SAY) demo "done"

.PHONY: serve
serve: install ## leave a tiered server running; prints a curl line and its flags
	@$(SAY) serve "starting a tiered server; stop it with Ctrl-C"
	@exec $(PY) benchmarks/serving/serve.py $(ARGS)

.PHONY: cluster
cluster: install ## a prefill, a decode and a colocated server with a router: who holds what
	@$(SAY) cluster "three servers and a router; ARGS=--stay leaves them running"
	@exec $(PY) benchmarks/cluster/show.py $(ARGS)

.PHONY: model
model: install ## train the demo model on 2 cores (at most 90 minutes; goes on if stopped)
	@$(SAY) model "training in out/model: stop it with Ctrl-C, run it again to go on"
	@exec $(PY) -m sgl_tiered_workloads.training --out out/model --resume $(ARGS)

.PHONY: doctor
doctor: install ## what this machine offers, and the flags it suggests
	@exec $(PY) -m sgl_tiered.cli.main doctor $(ARGS)

.PHONY: test
test: install ## lint and all tests but the long ones, as CI does; PART=NAME for a part
	@$(TEST) "$(or $(PART),lint fast servers)" $(ARGS)

.PHONY: test-unit
test-unit: install ## the tests that start no server
	@$(TEST) fast $(ARGS)

.PHONY: test-e2e
test-e2e: install ## the tests that start real servers
	@$(TEST) e2e $(ARGS)

.PHONY: test-full
test-full: install ## everything; PART=fast, e2e, cluster, faults or scenarios for one
	@$(TEST) "$(or $(PART),lint fast e2e cluster faults scenarios)" --long $(ARGS)

.PHONY: test-cxl
test-cxl: install ## the CXL tier on memory like CXL's, in a QEMU guest
	@bash scripts/test-cxl.sh "$(VENV)" $(ARGS)

.PHONY: fuzz
fuzz: install ## odd inputs at every entry point, and planted faults (20 minutes)
	@$(SAY) fuzz "10,000 inputs per target; last line is one JSON object"
	@exec $(PY) -m tests.fuzz $(KEEP) $(ARGS)

.PHONY: soak
soak: install ## 45 minutes of load: memory, threads, step times, what is left (--minutes N)
	@$(SAY) soak "plain SGLang, a tiered server and one that leaks; last line is one JSON object"
	@exec $(PY) -m tests.soak $(KEEP) $(ARGS)

.PHONY: equality
equality: install ## every combination against plain SGLang, faults and kills (45 minutes)
	@$(SAY) equality "worlds in turns, what is kept adds up; last line is one JSON object"
	@exec $(PY) -m tests.equality $(ARGS)

.PHONY: docs
docs: ## the documentation as a site in out/site, strictly: every link, llms.txt
	@PYTHON="$(PYTHON)" bash scripts/docs.sh

.PHONY: wheels
wheels: ## both packages in out/dist, checked and installed in a clean environment
	@PYTHON="$(PYTHON)" bash scripts/wheels.sh

.PHONY: results
results: install ## figures and pictures of README and docs, from committed records
	@$(PY) scripts/results.py $(ARGS)

.PHONY: test-docs
test-docs: install ## every command of README and docs that runs on a CPU (--long: all of them)
	@$(PY) scripts/docs_commands.py $(ARGS)

.PHONY: lint
lint: install ## ruff, mypy --strict and the import contracts
	@bash scripts/lint.sh "$(VENV)"

.PHONY: format
format: install ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

.PHONY: check
check: install ## lint and the tests that start no server
	@$(TEST) "lint fast" $(ARGS)

.PHONY: bench-reuse
bench-reuse: install ## plain SGLang, HiCache and sgl-tiered; last line is one JSON object
	@$(SAY) bench "plain SGLang, HiCache and sgl-tiered on the reuse workloads"
	@exec $(PY) benchmarks/serving/bench_reuse.py $(KEEP) $(ARGS)

.PHONY: bench-no-reuse
bench-no-reuse: install ## prompts that never come again, against plain SGLang (45 minutes)
	@$(SAY) bench "plain SGLang twice and sgl-tiered in turns; last line is one JSON object"
	@exec $(PY) benchmarks/serving/bench_no_reuse.py $(KEEP) $(ARGS)

.PHONY: bench-chat
bench-chat: install ## plain SGLang and sgl-tiered on a chat, by the harness: a report
	@exec $(BENCH) chat -m sgl_tiered.cli.main bench run benchmarks/specs/chat.toml \
	  --out out/bench-chat $(ARGS)

.PHONY: bench-tree
bench-tree: install ## LSPDojo's tree search on plain SGLang and on sgl-tiered
	@exec $(BENCH) tree benchmarks/serving/lsp_tree.py $(ARGS)

.PHONY: bench-disk
bench-disk: install ## the disk tier against fio on the same files
	@exec $(BENCH) disk benchmarks/disk/bench_disk.py $(ARGS)

.PHONY: bench-restart
bench-restart: install ## a restart on a disk with 5 million pages
	@exec $(PY) benchmarks/disk/bench_restart.py $(KEEP) $(ARGS)

.PHONY: bench-pipeline
bench-pipeline: install ## loads under a forward, and offloads under prefill (throttled)
	@exec $(BENCH) pipeline benchmarks/serving/bench_pipeline.py $(ARGS)

.PHONY: bench-planner
bench-planner: install ## the planner against always loading and never loading (throttled)
	@exec $(BENCH) planner benchmarks/serving/bench_planner.py $(ARGS)

.PHONY: bench-orders
bench-orders: install ## orders of the queue, prefetch and text analysis (throttled)
	@exec $(BENCH) orders benchmarks/serving/bench_orders.py $(ARGS)

.PHONY: bench-layerkv
bench-layerkv: install ## layer-wise KV against plain SGLang (emulated link)
	@exec $(BENCH) layerkv benchmarks/serving/bench_layerkv.py $(ARGS)

.PHONY: bench-activations
bench-activations: install ## activations beside KV, rebuilt under loads (emulated link)
	@exec $(BENCH) activations benchmarks/serving/bench_activations.py $(ARGS)

.PHONY: bench-slo
bench-slo: install ## SLO admission off and on: violations and throughput
	@exec $(BENCH) slo benchmarks/serving/bench_slo.py $(ARGS)

.PHONY: bench-sparsity
bench-sparsity: install ## dropping and encoding KV: quality, and TTFT (emulated link)
	@exec $(BENCH) sparsity benchmarks/quality/bench_sparsity.py $(ARGS)

.PHONY: bench-pool
bench-pool: install ## calls of the memory pool, and transfers against their transport
	@exec $(BENCH) pool benchmarks/pool/bench_pool.py $(ARGS)

.PHONY: bench-cluster
bench-cluster: install ## routers, and prefill/decode pairs, ours and SGLang's (45 minutes)
	@bash scripts/peers.sh "$(VENV)"
	@exec $(BENCH) cluster benchmarks/cluster/bench_cluster.py $(ARGS)

.PHONY: bench-router
bench-router: install ## routers, ours and SGLang's, where memory is short; resumable
	@bash scripts/peers.sh "$(VENV)"
	@$(SAY) router "45 minutes a call, calls add up; last line is one JSON object"
	@exec $(PY) benchmarks/cluster/bench_router.py $(KEEP) $(ARGS)

.PHONY: bench-store
bench-store: install ## a prefix from another server: our pool, Mooncake Store; resumable
	@$(SAY) store "45 minutes a call, calls add up; last line is one JSON object"
	@exec $(PY) benchmarks/cluster/bench_store.py $(KEEP) $(ARGS)

.PHONY: bench-gpu
bench-gpu: install ## all that has to be seen on a GPU; ARGS=--dry-run on a CPU
	@exec $(BENCH) gpu benchmarks/gpu/session.py $(ARGS)

.PHONY: bench-llama
bench-llama: install ## plain SGLang, HiCache, LMCache and tiers on one GPU: MODEL=path
	@exec $(BENCH) llama benchmarks/gpu/llama.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

.PHONY: host-waits
host-waits: install ## what would hold the scheduler on a CUDA device, counted on a CPU
	@$(SAY) waits "SGLang's scheduler over a played device; last line is one JSON object"
	@exec $(BENCH) host-waits tests/contract/count_waits.py $(ARGS)

.PHONY: compile-kernels
compile-kernels: install ## every Triton kernel for sm_80, sm_90 and sm_100, without a GPU
	@$(SAY) compile "every variant: registers and spills against benchmarks/gpu/kernels.json"
	@exec $(BENCH) compile-kernels benchmarks/gpu/compile_kernels.py $(ARGS)

.PHONY: bench-fidelity
bench-fidelity: install ## how far the simulator is from a real server
	@exec $(BENCH) fidelity benchmarks/sim/fidelity.py $(ARGS)

.PHONY: bench-sim
bench-sim: install ## tables of the simulator, hours of CPU; ARGS="NAME ..." picks
	@bash scripts/sims.sh "$(TRACES)" "$(ARGS)" $(BENCH)

.PHONY: bench-micro
bench-micro: install ## every micro benchmark, one after the other; PART=NAME for one
	@for script in benchmarks/micro/$(or $(PART),[!_]*).py; do \
	  name=$$(basename "$$script" .py); \
	  $(SAY) bench "$$script"; $(BENCH) "micro-$$name" "$$script" $(ARGS); \
	done
	@for num in $(if $(filter-out routing,$(PART)),,10 100 1000); do \
	  $(SAY) bench "routing, $$num instances"; \
	  $(BENCH) micro-routing benchmarks/micro/routing.py --instances "$$num" --pages 512; \
	done
	@$(SAY) bench "done"

.PHONY: clean
clean: ## remove caches and build outputs; keeps the environment and made models
	@$(SAY) clean "removing caches, build outputs"
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.cache/*' -prune -exec rm -rf {} +
	@$(SAY) clean "done; also remove .venv and .cache to start from nothing"
