"""The launcher reports deaths clearly and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sgl_tiered_workloads.server import (
    ServerSpec,
    ServerStartError,
    SglangServer,
    free_port,
)

# Answers every request; starts a child of its own first, as SGLang does, and
# writes both process ids and its environment to the file in STAND_IN_OUT.
STAND_IN = """
    import http.server, json, os, signal, subprocess, sys
    port = int(sys.argv[sys.argv.index("--port") + 1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    class Answer(http.server.BaseHTTPRequestHandler):
        def _answer(self, body):
            self.send_response(200 if self.path != "/bad" else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            facts = {"pids": [os.getpid(), child.pid], "env": dict(os.environ),
                     "argv": sys.argv}
            self._answer(json.dumps(facts).encode())
        def do_POST(self):
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))
        def log_message(self, *args):
            pass
    http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def silent(_: str) -> None:
    """Take progress lines and drop them."""


def spec(tmp_path: Path, code: str, **env: str | None) -> ServerSpec:
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(code))
    return ServerSpec(
        name="stand-in",
        model=Path("some/model"),
        flags=("--page-size", "16"),
        env=env,
        program=(sys.executable, str(program)),
    )


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_dies_is_reported_with_its_code_and_log(tmp_path: Path) -> None:
    """The error carries the exit code and what the server last said."""
    code = "import sys; print('the pool is too small'); sys.exit(3)"
    server = SglangServer(spec(tmp_path, code), tmp_path, say=silent)
    with pytest.raises(ServerStartError, match="the pool is too small") as caught:
        server.start()
    assert caught.value.exit_code == 3
    assert "ended with code 3" in str(caught.value)
    assert server.pid is None


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    """After the time-out there is an error and no process."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    server = SglangServer(
        spec(tmp_path, code), tmp_path, start_timeout_s=5.0, say=silent
    )
    with pytest.raises(ServerStartError, match="gave no answer"):
        server.start()
    pid = int(server.log_path.read_text().splitlines()[1])
    assert not alive(pid)


@pytest.mark.parametrize("stubborn", [None, "1"])
def test_stop_ends_the_server_and_its_children(
    tmp_path: Path, stubborn: str | None
) -> None:
    """Neither a child nor a server that ignores SIGTERM survives a stop."""
    with SglangServer(
        spec(tmp_path, STAND_IN, STUBBORN=stubborn), tmp_path, say=silent
    ) as server:
        pids = server.get("/facts")["pids"]
        assert all(alive(pid) for pid in pids)
        server.stop(grace_s=0.5)
    assert not any(alive(pid) for pid in pids)


def test_an_owner_that_ends_with_an_error_leaves_no_server(tmp_path: Path) -> None:
    """Servers end with the interpreter, even where nobody stopped them."""
    made = spec(tmp_path, STAND_IN)
    owner = textwrap.dedent(f"""
        from pathlib import Path
        from sgl_tiered_workloads.server import *
        made = ServerSpec("s", Path("m"), program={made.program!r})
        server = SglangServer(made, Path({str(tmp_path)!r}), say=lambda text: None)
        server.start()
        print(*server.get("/facts")["pids"], flush=True)
        raise KeyboardInterrupt
    """)
    done = subprocess.run(
        [sys.executable, "-c", owner], capture_output=True, text=True, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert not any(alive(pid) for pid in pids)


def test_flags_and_environment_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags go through as they are; variables can be set and removed."""
    monkeypatch.setenv("TO_BE_REMOVED", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    made = spec(tmp_path, STAND_IN, OMP_NUM_THREADS="3", TO_BE_REMOVED=None)
    with SglangServer(made, tmp_path, say=silent) as server:
        facts = server.get("/facts")
        assert server.start_s > 0
    argv = facts["argv"]
    assert argv[argv.index("--model-path") + 1] == "some/model"
    assert argv[-2:] == ["--page-size", "16"]
    assert facts["env"]["OMP_NUM_THREADS"] == "3"
    assert "TO_BE_REMOVED" not in facts["env"]
    assert "PYTHONDONTWRITEBYTECODE" not in facts["env"]


def test_generate_sends_a_greedy_request_and_errors_name_the_path(
    tmp_path: Path,
) -> None:
    """The one-shot call is greedy; an HTTP error says where and why."""
    with SglangServer(spec(tmp_path, STAND_IN), tmp_path, say=silent) as server:
        body = server.generate([1, 2, 3], 5, return_logprob=True)
        assert body["input_ids"] == [1, 2, 3]
        assert body["sampling_params"]["temperature"] == 0.0
        assert body["sampling_params"]["max_new_tokens"] == 5
        assert body["return_logprob"] is True
        with pytest.raises(RuntimeError, match="/bad: HTTP 400"):
            server.post("/bad", {})


def test_a_port_that_somebody_has_taken_is_not_waited_for(tmp_path: Path) -> None:
    """SGLang's schedulers run on when its web server could not bind."""
    code = """
        import time
        print("[Errno 98] error while attempting to bind on address", flush=True)
        time.sleep(600)
    """
    server = SglangServer(spec(tmp_path, code), tmp_path, say=silent)
    with pytest.raises(ServerStartError, match=f"port {server.port} is taken"):
        server.start()


def test_free_ports_are_none_of_those_of_outgoing_connections() -> None:
    """Else one of them may have it before its server binds it."""
    first, end = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert not int(first) <= free_port() <= int(end)


def test_free_port_skips_a_taken_one(tmp_path: Path) -> None:
    """Of the candidates, the first that nobody listens on is taken."""
    with SglangServer(spec(tmp_path, STAND_IN), tmp_path, say=silent) as server:
        other = free_port()
        assert free_port([server.port, other]) == other
        with pytest.raises(OSError, match="no free port"):
            free_port([server.port])
