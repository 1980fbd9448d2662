"""Memory on NUMA nodes: which nodes, is there room, and where did it really go."""

import ctypes
import errno
import mmap

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers import numa
from sgl_tiered.tiers.memory import aligned_buffer
from sgl_tiered.tiers.numa import NumaRegion, Placement, placement_of
from sgl_tiered.tiers.numa_calls import BIND, INTERLEAVE, WEIGHTED_INTERLEAVE, NumaCalls
from tests.unit.tiers.sysfs_support import (
    GIB,
    add_node,
    add_nodes,
    first_node,
    set_weight,
)

PAGE = mmap.PAGESIZE


class Kernel:
    """Answers like a kernel that places pages as ``place(page number)`` says."""

    def __init__(self, place, *, refused=()):
        self.place = place
        self.refused = refused
        self.bound = []
        self.asked = []

    def calls(self):
        return NumaCalls(self._mbind, self._move_pages, "fake")

    def _mbind(self, address, num_bytes, policy, mask, max_node, flags):
        nodes = [
            word * 64 + bit
            for word, value in enumerate(mask)
            for bit in range(64)
            if value >> bit & 1
        ]
        assert max_node.value == 64 * len(mask) + 1
        if policy.value in self.refused:
            ctypes.set_errno(errno.EINVAL)
            return -1
        self.begin = address.value
        self.bound.append((num_bytes.value, policy.value, nodes))
        return 0

    def _move_pages(self, pid, count, pages, nodes, status, flags):
        assert (pid.value, nodes.value, flags.value) == (0, None, 0)
        addresses = (ctypes.c_uint64 * count.value).from_address(pages.value)
        answers = (ctypes.c_int * count.value).from_address(status.value)
        for i, address in enumerate(addresses):
            assert address % PAGE == 0
            page = (address - self.begin) // PAGE
            self.asked.append(page)
            answers[i] = self.place(page)
        return 0


@pytest.fixture
def sysfs(tmp_path):
    """Cores on nodes 0 and 1, memory without cores on 2 and 3."""
    return add_nodes(tmp_path, cores="0-1", memory="0-3")


def region(sysfs, kernel, nodes=(2,), num_rows=64):
    return NumaRegion(num_rows, PAGE, nodes, calls=kernel.calls(), sysfs=sysfs)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("\n", ()), ("0", (0,)), ("0-2,8", (0, 1, 2, 8)), ("5,7-8", (5, 7, 8))],
)
def test_lists_of_the_kernel_are_understood(text, ids):
    """Ranges and single numbers, and nothing at all."""
    assert numa.parse_ids(text) == ids


def test_nodes_without_cores_are_found(sysfs, tmp_path):
    """Memory minus cores; a kernel that knows no nodes has none."""
    assert numa.memory_only_nodes(sysfs) == (2, 3)
    assert numa.nodes_with_cores(sysfs) == (0, 1)
    assert numa.memory_only_nodes(tmp_path / "none") == ()


def test_a_node_that_is_not_there_is_refused(sysfs):
    """The sentence names the nodes that there are."""
    numa.check_nodes((0, 3), sysfs)
    with pytest.raises(ConfigError, match=r"node 4 .* with memory: 0, 1, 2, 3"):
        numa.check_nodes((3, 4), sysfs)


def test_some_of_a_node_is_left_to_the_kernel(sysfs):
    """Free memory counts, less two hundredths of the node; unknown is nothing."""
    add_node(sysfs, 2, total=100 * GIB, free=50 * GIB)
    assert numa.free_node_bytes(2, sysfs) == 48 * GIB
    add_node(sysfs, 2, total=100 * GIB, free=GIB)
    assert numa.free_node_bytes(2, sysfs) == 0
    assert numa.free_node_bytes(9, sysfs) == 0


def test_the_largest_region_follows_the_shares(sysfs):
    """Evenly: twice the smaller node. By weight: until the first node is full."""
    add_node(sysfs, 2, total=0, free=2 * GIB)
    add_node(sysfs, 3, total=0, free=6 * GIB)
    assert numa.largest_region_bytes((2, 3), sysfs) == 4 * GIB
    set_weight(sysfs, 2, 1)
    set_weight(sysfs, 3, 3)
    assert numa.largest_region_bytes((2, 3), sysfs) == 8 * GIB


def test_more_than_a_node_has_is_refused_before_it_is_taken(sysfs):
    """Binding beyond a node's memory would kill a process, so it is not tried."""
    kernel = Kernel(lambda page: 2)
    add_node(sysfs, 2, total=0, free=63 * PAGE)
    with pytest.raises(ConfigError, match="would go to NUMA node 2") as caught:
        region(sysfs, kernel)
    assert caught.value.setting == "--tiered-cxl-size"
    assert kernel.bound == []


def test_one_node_is_bound(sysfs):
    """The whole region, strictly, and every page was asked for."""
    kernel = Kernel(lambda page: 2)
    made = region(sysfs, kernel)
    assert kernel.bound == [(64 * PAGE, BIND, [2])]
    assert sorted(kernel.asked) == list(range(64))
    assert made.policy == "bound"
    assert made.placement == Placement({2: 64}, 0, 64, 64)
    assert made.array.shape == (64, PAGE)
    assert made.array.ctypes.data % PAGE == 0
    made.array[:] = 7
    made.close()
    made.close()


def test_node_numbers_beyond_a_word_fit_the_mask(sysfs):
    """Large machines number their nodes beyond 63."""
    add_nodes(sysfs, cores="0", memory="0,130")
    kernel = Kernel(lambda page: 130)
    region(sysfs, kernel, nodes=(130,))
    assert kernel.bound == [(64 * PAGE, BIND, [130])]


@pytest.mark.parametrize(
    ("refused", "policy", "words"),
    [
        ((), WEIGHTED_INTERLEAVE, "interleaved by weight"),
        ((WEIGHTED_INTERLEAVE,), INTERLEAVE, "interleaved"),
    ],
)
def test_several_nodes_are_interleaved(sysfs, refused, policy, words):
    """By weight where the kernel can, evenly where it cannot."""
    kernel = Kernel(lambda page: 2 + page % 2, refused=refused)
    made = region(sysfs, kernel, nodes=(2, 3))
    assert kernel.bound == [(64 * PAGE, policy, [2, 3])]
    assert made.policy == words
    assert made.placement.pages_by_node == {2: 32, 3: 32}


@pytest.mark.parametrize(
    ("place", "nodes", "words"),
    [
        (
            lambda page: 0 if page == 5 else 2,
            (2,),
            r"elsewhere .*node 0 2%, node 2 98%",
        ),
        (lambda page: 2, (2, 3), r"nothing on node 3 .*node 2 100%"),
        (lambda page: -errno.ENOENT, (2,), r"elsewhere .*none there, 64 absent"),
    ],
)
def test_a_wrong_placement_stops_the_start(sysfs, place, nodes, words):
    """One page astray, a node left out, or pages that are not there at all."""
    kernel = Kernel(place)
    with pytest.raises(ConfigError, match=words) as caught:
        region(sysfs, kernel, nodes=nodes)
    assert caught.value.setting == "--tiered-cxl"
    assert "cpuset" in caught.value.remedy


def test_a_page_on_its_way_is_tolerated():
    """One page in a hundred may be moved by the kernel at the moment of asking."""
    Placement({1: 99}, 1, 100, 100).check((1,))
    with pytest.raises(ConfigError, match="2 absent"):
        Placement({1: 98}, 2, 100, 100).check((1,))


def test_a_kernel_that_refuses_is_told_in_a_sentence(sysfs):
    """No traceback of an OSError: a setting, a reason, a remedy."""
    kernel = Kernel(lambda page: 2, refused=(BIND,))
    with pytest.raises(ConfigError, match="does not place memory on NUMA node 2"):
        region(sysfs, kernel)


def test_a_large_range_is_sampled_and_interleaving_does_not_fool_it(sysfs):
    """Of many pages a part is asked, and both nodes of an interleaving are seen."""
    kernel = Kernel(lambda page: 2 + page % 2)
    buffer = aligned_buffer(64, PAGE)
    kernel.begin = buffer.ctypes.data
    found = placement_of(kernel.begin, 64 * PAGE, kernel.calls(), max_checked=32)
    assert (found.num_checked, found.num_pages) == (32, 64)
    assert len(kernel.asked) == 32
    assert set(kernel.asked) <= set(range(64))
    assert set(found.pages_by_node) == {2, 3}
    assert sum(found.pages_by_node.values()) == 32


def test_the_region_is_pinned_once_it_is_placed_and_unpinned_once(sysfs):
    """A device is shown the region after the check, not before."""
    kernel = Kernel(lambda page: 2)
    calls = []

    def register(address, num_bytes):
        calls.append((address, num_bytes, len(kernel.asked)))
        return lambda: calls.append("undone")

    made = NumaRegion(
        64, PAGE, (2,), register=register, calls=kernel.calls(), sysfs=sysfs
    )
    made.close()
    made.close()
    assert calls == [(made.array.ctypes.data, 64 * PAGE, 64), "undone"]


@pytest.mark.parametrize("find", [NumaCalls.of_libnuma, NumaCalls.by_number])
def test_this_machine_places_memory_on_a_node_of_its_own(find):
    """Both ways to the kernel bind real memory and say where it lies."""
    node = first_node()
    try:
        calls = find()
    except OSError as error:
        pytest.skip(f"not to be had here: {error}")
    made = NumaRegion(512, PAGE, (node,), calls=calls)
    assert made.placement == Placement({node: 512}, 0, 512, 512)
    assert not made.array.any()


def test_pages_that_are_not_there_have_no_node():
    """The kernel's answer for untouched memory is an errno, not a node."""
    first_node()
    calls = NumaCalls.find()
    mapping = mmap.mmap(-1, 4 * PAGE)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    mapping[0] = 1
    nodes = calls.nodes_of(np.array([address, address + 2 * PAGE], np.uint64))
    assert nodes[0] >= 0
    assert nodes[1] < 0


def test_an_architecture_that_is_not_known_says_so(monkeypatch):
    """Without libnuma and without a number there is a clear error."""
    monkeypatch.setattr("sgl_tiered.tiers.numa_calls.platform.machine", lambda: "vax")
    with pytest.raises(OSError, match="no NUMA calls on vax"):
        NumaCalls.by_number()
