"""Facts about the machine, read from trees made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_tiered.cli import machine

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 64 GiB, of which 48 GiB are free."""
    kib = 2**20
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 * kib} kB\nMemAvailable:   {48 * kib} kB\nHugePages_Total: 0\n",
    )
    return tmp_path / "proc"


def test_memory_without_cgroups(proc: Path, tmp_path: Path) -> None:
    """Where no cgroup is readable the machine's own figures count."""
    facts = machine.memory_facts(proc, tmp_path / "none")
    assert facts == machine.MemoryFacts(64 * GIB, 48 * GIB, None)


def test_memory_under_a_cgroup_v2_limit_of_a_parent(proc: Path, tmp_path: Path) -> None:
    """A group above ours limits us too, and page cache that can go counts as free."""
    cgroup = tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/slice/unit\n")
    write(cgroup / "slice/unit/memory.max", "max\n")
    write(cgroup / "slice/unit/memory.current", f"{3 * GIB}\n")
    write(cgroup / "slice/memory.max", f"{8 * GIB}\n")
    write(cgroup / "slice/memory.current", f"{5 * GIB}\n")
    write(cgroup / "slice/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    facts = machine.memory_facts(proc, cgroup)
    assert facts == machine.MemoryFacts(64 * GIB, 5 * GIB, 8 * GIB)


def test_memory_under_a_cgroup_v1_limit(proc: Path, tmp_path: Path) -> None:
    """The v1 files count as well, also where our group is seen as the root."""
    cgroup = tmp_path / "cgroup"
    write(proc / "self/cgroup", "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n")
    write(cgroup / "memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(cgroup / "memory/memory.usage_in_bytes", f"{GIB}\n")
    facts = machine.memory_facts(proc, cgroup)
    assert (facts.available_bytes, facts.limit_bytes) == (3 * GIB, 4 * GIB)


def test_a_cgroup_v1_without_a_limit_is_no_limit(proc: Path, tmp_path: Path) -> None:
    """The huge number that v1 writes for "none" is not shown as a limit."""
    cgroup = tmp_path / "cgroup"
    write(proc / "self/cgroup", "4:memory:/\n")
    write(cgroup / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory/memory.usage_in_bytes", "1\n")
    assert machine.memory_facts(proc, cgroup).limit_bytes is None


def test_memory_used_beyond_the_limit_is_not_negative(
    proc: Path, tmp_path: Path
) -> None:
    """A group over its limit has nothing free."""
    write(proc / "self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/memory.max", f"{GIB}\n")
    write(tmp_path / "cgroup/memory.current", f"{2 * GIB}\n")
    assert machine.memory_facts(proc, tmp_path / "cgroup").available_bytes == 0


@pytest.mark.parametrize(
    ("lines", "file", "text", "quota"),
    [
        ("0::/box\n", "box/cpu.max", "150000 100000\n", 1.5),
        ("0::/box\n", "box/cpu.max", "max 100000\n", None),
        ("3:cpu:/\n", "cpu/cpu.cfs_quota_us", "-1\n", None),
    ],
)
def test_cpu_quota(
    proc: Path, tmp_path: Path, lines: str, file: str, text: str, quota: float | None
) -> None:
    """The cgroup's quota is given in cores, and "max" or -1 is none."""
    write(proc / "self/cgroup", lines)
    write(tmp_path / "cgroup" / file, text)
    write(tmp_path / "cgroup/cpu/cpu.cfs_period_us", "100000\n")
    facts = machine.cpu_facts(proc, tmp_path / "cgroup")
    assert facts.quota_cores == quota
    assert facts.num_cores >= 1


def test_a_node_without_cores_is_found(tmp_path: Path) -> None:
    """Memory without cores is told apart, in the order of the node numbers."""
    for node, cpus in ((10, ""), (0, "0-3,8-11"), (2, "4-7")):
        write(tmp_path / f"node{node}/cpulist", f"{cpus}\n")
        write(
            tmp_path / f"node{node}/meminfo",
            f"Node {node} MemTotal:  2048 kB\nNode {node} MemFree:   1024 kB\n",
        )
    write(tmp_path / "possible", "0-10\n")
    nodes = machine.numa_nodes(tmp_path)
    assert [node.node_id for node in nodes] == [0, 2, 10]
    assert [node.is_memory_only for node in nodes] == [False, False, True]
    assert nodes[2] == machine.NumaNode(10, "", 2**21, 2**20)


def test_no_node_folder_means_no_nodes(tmp_path: Path) -> None:
    """A kernel without NUMA has no such folder."""
    assert machine.numa_nodes(tmp_path / "none") == []


def test_huge_pages(tmp_path: Path) -> None:
    """The chosen mode stands in brackets; pages are counted by their size."""
    write(tmp_path / "transparent_hugepage/enabled", "always [madvise] never\n")
    write(tmp_path / "hugepages/hugepages-2048kB/nr_hugepages", "512\n")
    write(tmp_path / "hugepages/hugepages-2048kB/free_hugepages", "100\n")
    facts = machine.huge_page_facts(tmp_path)
    assert facts == machine.HugePageFacts("madvise", {2 * 2**20: (512, 100)})
    assert machine.huge_page_facts(tmp_path / "none").transparent == "unknown"
