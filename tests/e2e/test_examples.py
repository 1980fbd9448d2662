"""The examples, as a reader runs them: clients of a server, and clusters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sgl_tiered_workloads.server import free_port
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "workloads/models/demo"
SETTINGS = ROOT / "examples/settings/laptop.toml"
PATIENCE_S = 600.0

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.full]


@pytest.fixture
def server(servers, tmp_path_factory):
    """The trained model with the settings of a laptop, and a disk of its own."""
    folder = tmp_path_factory.getbasetemp() / "examples"
    flags = (
        *("--radix-cache-backend", "tiered", "--tiered-config", str(SETTINGS)),
        *("--tiered-host-size", "200MB"),
        *("--tiered-disk-path", str(folder), "--tiered-disk-size", "500MB"),
    )
    return servers.get(plain_spec(Device(MODEL, 16384, 16, CPU_FLAGS), "ex", flags))


def run(*command, **variables):
    """Run a program of the examples; return what it printed."""
    found = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **{name: str(value) for name, value in variables.items()},
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def client(name, server, *words):
    """Run a client of the examples."""
    path = ROOT / "examples/clients" / f"{name}.py"
    return run(sys.executable, path, "--url", server.url, *words)


def test_the_chat_comes_back_from_below(server):
    """With the device emptied the last turn's past comes from host memory."""
    told = client("chat", server, "--drop", "device").splitlines()
    assert len(told) == 3
    assert " from device" in told[1]
    assert " from host" in told[2]
    assert " from device" not in told[2]


def test_agents_share_their_beginning(server):
    """All but the first prompts of the agents come from a cache for the most part."""
    told = client("agents", server, "--agents", 3, "--steps", 3, "--pause", 0.1)
    assert told.count("agent ") == 9
    assert " from device" in told


def test_documents_are_used_again(server):
    """The second question about a document computes little of it."""
    told = client("rag", server).splitlines()
    assert len(told) == 13
    assert all(" from " in line for line in told[4:12])


def test_the_program_runs(server):
    """A fork and a choice, twice."""
    told = client("judge", server)
    assert "run 2: verdict" in told


def test_the_search_leaves_a_tree(server, tmp_path):
    """The tree search writes what it found, whether it repaired anything or not."""
    script = ROOT / "examples/lsp_tree/search.sh"
    few = ("--max-nodes", 2, "--max-new-tokens", 32, "--samples", 1)
    run("bash", script, server.url, tmp_path / "tree", *few)
    assert (tmp_path / "tree/tree.jsonl").read_text().strip()


@pytest.mark.parametrize("name", ["pd_pair", "pool_router"])
def test_servers_of_an_example_answer(servers, tmp_path, name):
    """The script starts them, asks through the router, and ends all of them."""
    servers.stop()
    first = int(os.environ.get("TIERED_TEST_PORTS", f"{free_port()}-").split("-")[0])
    script = ROOT / "examples" / name / "start.sh"
    told = run("bash", script, "--check", FIRST_PORT=first, OUT=tmp_path / name)
    assert '"choices"' in told
    assert "x-tiered-instance" in told.lower()
