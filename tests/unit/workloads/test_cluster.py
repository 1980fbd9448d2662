"""Clusters of stand-ins: ports, flags, faults, and no process left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sgl_tiered_workloads.cluster.members import (
    COLOCATED,
    DECODE,
    PREFILL,
    Member,
    mooncake,
    new_member,
    tiered,
)
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster, forwarder, read_json
from sgl_tiered_workloads.processes import Service, ServiceError
from sgl_tiered_workloads.server import ServerStartError
from sgl_tiered_workloads.systems import MB, Device

DEVICE = Device(Path("some/model"), 1024)
PATIENCE_S = 60.0
ANSWERING = """
    import http.server, json, os, sys
    port = int(sys.argv[sys.argv.index("--port") + 1])
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"pid": os.getpid(), "env": dict(os.environ)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *args):
            pass
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def stand_in(tmp_path: Path, ports: Ports, name: str, code: str = ANSWERING) -> Member:
    """A colocated server that answers every GET."""
    program = tmp_path / f"{name}.py"
    program.write_text(textwrap.dedent(code))
    member = new_member(DEVICE, COLOCATED, name, ports, events=False)
    spec = replace(member.spec, program=(sys.executable, str(program)))
    return replace(member, spec=spec)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def refuses(url: str) -> bool:
    try:
        read_json(url, 5.0)
    except OSError:
        return True
    return False


def test_no_port_is_given_twice() -> None:
    """Equal seeds draw alike, so a taken port must be skipped, not given."""
    first = Ports(3).take()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        ports = Ports(3)
        given = [ports.take() for _ in range(50)]
    assert first not in given
    assert len(set(given)) == 50


def test_a_member_says_how_it_is_reached() -> None:
    """Flags of a kind, and the router's word for it, name the same ports."""
    ports = Ports()
    handover = tiered(2, "file:/pool", 64 * MB)
    member = new_member(DEVICE, PREFILL, "p0", ports, handover=handover)
    flags = member.spec.flags
    bootstrap = flags[flags.index("--disaggregation-bootstrap-port") + 1]
    assert member.word("http://h:1") == (
        f"http://h:1,kind=prefill,name=p0,bootstrap={bootstrap}"
    )
    assert f'"endpoint": "tcp://*:{member.event_port}"' in " ".join(flags)
    assert member.spec.env["OMP_NUM_THREADS"] == "1"
    with pytest.raises(ValueError, match="needs a hand-over"):
        new_member(DEVICE, DECODE, "d0", ports)


def test_only_mode_3_asks_for_tiers_and_a_pool() -> None:
    """The other modes keep KV on devices, which needs neither."""
    for caching in range(4):
        flags = tiered(caching, "file:/pool", 64 * MB).decode
        assert flags[:2] == ("--tiered-pd-caching", str(caching))
        assert ("--tiered-pool" in flags) == (caching == 3)
        assert ("--radix-cache-backend" in flags) == (caching == 3)


def test_sglangs_pair_caches_on_both_sides_or_on_none() -> None:
    """The decode side's cache is off in SGLang unless it is asked for."""
    both, none = mooncake(caches=True), mooncake(caches=False)
    asked = "--disaggregation-decode-enable-radix-cache"
    assert asked in both.decode
    assert asked not in none.decode
    assert none.prefill == ("--disable-radix-cache",)


def test_killed_and_started_again_at_the_same_address(tmp_path: Path) -> None:
    """A killed server refuses; its restart answers there, with a log of its own."""
    ports = Ports()
    members = [stand_in(tmp_path, ports, name) for name in ("left", "right")]
    with Cluster(members, tmp_path / "logs", say=lambda _: None) as cluster:
        url = cluster.url("left")
        before = read_json(url)["pid"]
        cluster.kill("left")
        wait_until(lambda: not runs(before))
        assert refuses(url)
        assert read_json(cluster.url("right"))
        cluster.restart("left")
        after = read_json(url)["pid"]
        assert after != before
        assert len(list((tmp_path / "logs").rglob("left-*.log"))) == 2
        pids = [after, read_json(cluster.url("right"))["pid"]]
    assert not any(map(runs, pids))


def test_a_stopped_server_is_ended_with_the_rest(tmp_path: Path) -> None:
    """A process that was stopped and never went on is not left behind."""
    member = stand_in(tmp_path, Ports(), "left")
    with Cluster([member], tmp_path / "logs", say=lambda _: None) as cluster:
        pid = read_json(cluster.url("left"))["pid"]
        cluster.pause("left")
        with pytest.raises(OSError, match="timed out"):
            read_json(cluster.url("left"), 0.2)
    assert not runs(pid)


def test_one_that_does_not_start_ends_the_others(tmp_path: Path) -> None:
    """The error names the server, and the one that did start is ended."""
    ports = Ports()
    noted = tmp_path / "pid"
    good = stand_in(
        tmp_path,
        ports,
        "good",
        f"import os, pathlib\npathlib.Path({str(noted)!r}).write_text(str(os.getpid()))"
        + textwrap.dedent(ANSWERING),
    )
    bad = stand_in(tmp_path, ports, "bad", "raise SystemExit('no model')")
    cluster = Cluster([good, bad], tmp_path / "logs", say=lambda _: None)
    with pytest.raises(ServerStartError, match="server bad ended"):
        cluster.__enter__()
    assert not noted.exists() or not runs(int(noted.read_text()))


def test_a_cut_path(tmp_path: Path) -> None:
    """A forwarder passes on; killed, its port refuses; the server itself runs on."""
    ports = Ports()
    member = stand_in(tmp_path, ports, "left")
    entrance = ports.take()
    path = forwarder(entrance, member.port, tmp_path / "logs", "path")
    url = f"http://127.0.0.1:{entrance}"
    with Cluster(
        [member], tmp_path / "logs", services=[path], say=lambda _: None
    ) as cluster:
        pid = read_json(cluster.url("left"))["pid"]
        assert read_json(url)["pid"] == pid
        cluster.kill("path")
        wait_until(lambda: refuses(url))
        assert read_json(cluster.url("left"))["pid"] == pid
        cluster.restart("path")
        assert read_json(url)["pid"] == pid
        cluster.pause("path")
        with pytest.raises(OSError, match="timed out"):
            read_json(url, 0.2)


def test_a_service_that_ends_says_why(tmp_path: Path) -> None:
    """The end of its log is in the error; one that is never ready is ended."""
    words = [sys.executable, "-c", "print('no room'); raise SystemExit(3)"]
    with pytest.raises(ServiceError, match=r"(?s)ended with code 3.*no room"):
        Service("broken", words, tmp_path, lambda: False).start()
    noted = tmp_path / "pid"
    code = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid()))"
    words = [sys.executable, "-c", code + "; time.sleep(600)"]
    slow = Service("slow", words, tmp_path, lambda: False, start_timeout_s=1.0)
    with pytest.raises(ServiceError, match="not ready"):
        slow.start()
    assert not noted.exists() or not runs(int(noted.read_text() or os.getpid()))


def test_a_signal_reaches_the_whole_group(tmp_path: Path) -> None:
    """A kill strikes what the process has started as well."""
    noted = tmp_path / "pids"
    code = f"""
        import os, subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep)
        part = {str(noted)!r} + ".part"
        open(part, "w").write(f"{{os.getpid()}} {{child.pid}}")
        os.rename(part, {str(noted)!r})
        time.sleep(600)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with Service("parent", words, tmp_path, noted.exists) as service:
        pids = [int(word) for word in noted.read_text().split()]
        service.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(runs, pids)))


def test_a_start_that_is_called_off_ends_at_once(tmp_path: Path) -> None:
    """Servers that would take for ever are ended, those still to come never start."""
    ports = Ports()
    code = f"""
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
        time.sleep(600)
    """
    members = [stand_in(tmp_path, ports, f"s{number}", code) for number in range(3)]
    cluster = Cluster(members, tmp_path / "logs", ports=ports, say=lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(cluster.__enter__)

        def started() -> list[int]:
            return [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]

        wait_until(lambda: len(started()) == 2)
        cluster.stop()
        with pytest.raises(ServerStartError):
            entered.result(PATIENCE_S)
    assert len(started()) == 2
    assert not any(map(runs, started()))
