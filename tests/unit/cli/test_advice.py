"""The verdict and the flags that the doctor suggests, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_tiered.cli import advice
from sgl_tiered.cli.advice import GB, Facts
from sgl_tiered.cli.engine import AcceleratorFacts, SeamFacts
from sgl_tiered.cli.machine import MemoryFacts, NumaNode
from sgl_tiered.tiers.devdax import DaxDevice

NO_GPU = AcceleratorFacts("2.14.1", None)


def test_a_good_machine_has_no_obstacle_and_no_remark(good: Facts) -> None:
    """Nothing is said where nothing is wrong."""
    assert advice.obstacles(good, {}) == []
    assert advice.remarks(good) == []


def test_the_suggestion_is_a_whole_command_line(good: Facts) -> None:
    """Half of free memory and of free disk, as auto takes; ready to be pasted."""
    suggestion = advice.suggest(good)
    assert suggestion is not None
    assert suggestion.command == (
        "python -m sglang.launch_server --model-path MODEL "
        "--radix-cache-backend tiered --page-size 16 --tiered-host-size 50GB "
        "--tiered-disk-path /mnt/nvme --tiered-disk-size 250GB"
    )


def test_a_path_with_spaces_is_quoted(good: Facts) -> None:
    """The command line survives a shell."""
    facts = replace(good, disk=replace(good.disk, path="/my disk"))
    suggestion = advice.suggest(facts)
    assert suggestion is not None
    assert "--tiered-disk-path '/my disk'" in suggestion.command


def test_the_sizes_are_of_a_rank(good: Facts) -> None:
    """Ranks share memory and disk, and the flags say what one of them takes."""
    suggestion = advice.suggest(good, "org/model", 4)
    assert suggestion is not None
    assert "--model-path org/model --tp 4" in suggestion.command
    assert "--tiered-host-size 12GB" in suggestion.command
    assert "--tiered-disk-size 62GB" in suggestion.command


def test_less_host_memory_where_model_and_pool_need_it_too(good: Facts) -> None:
    """Without an accelerator a quarter of free memory is suggested."""
    facts = replace(good, accelerator=NO_GPU)
    assert advice.host_size_bytes(facts) == 25 * GB
    assert "auto" in advice.remarks(facts)[0]


@pytest.mark.parametrize(
    ("free_gb", "size_gb"), [(500, 250), (40, 20), (11, 1), (10, 0), (0, 0)]
)
def test_disk_size_leaves_room_to_others(
    good: Facts, free_gb: int, size_gb: int
) -> None:
    """Half of the free space, as by default, and at least 10 GB stay free."""
    disk = replace(good.disk, free_bytes=free_gb * GB)
    assert advice.disk_size_bytes(disk) == size_gb * GB


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_memory": True, "file_system": "tmpfs"}, "lies in main memory"),
        ({"writable": False}, "cannot be written to"),
    ],
)
def test_a_disk_that_is_none_is_not_suggested(
    good: Facts, change: dict[str, object], words: str
) -> None:
    """tmpfs and read-only folders get a remark and no flags; serving goes on."""
    facts = replace(good, disk=replace(good.disk, **change))
    suggestion = advice.suggest(facts)
    assert suggestion is not None
    assert "--tiered-disk" not in suggestion.command
    assert words in advice.remarks(facts)[0]
    assert advice.obstacles(facts, {}) == []


def test_remarks_on_the_page_cache_version_and_memory_nodes(good: Facts) -> None:
    """What slows down or is not supported yet is said, and stops nothing."""
    facts = replace(
        good,
        disk=replace(good.disk, direct_io=False),
        engine=replace(good.engine, version="0.5.24"),
        numa_nodes=[NumaNode(3, "", GB, GB)],
    )
    text = " ".join(advice.remarks(facts))
    assert "Without O_DIRECT" in text
    assert "SGLang 0.5.24 is installed; 0.5.23 is tested" in text
    assert "NUMA nodes without cores: 3" in text
    assert advice.obstacles(facts, {}) == []


def test_nodes_without_cores_are_suggested_as_cxl(good: Facts) -> None:
    """All of them, with nine tenths of what is free, and not as host memory too."""
    far = [NumaNode(n, "", 40 * GB, free * GB) for n, free in ((2, 30), (3, 20))]
    facts = replace(good, numa_nodes=[*good.numa_nodes, *far])
    suggestion = advice.suggest(facts)
    assert suggestion is not None
    assert "--tiered-host-size 25GB" in suggestion.command
    assert "--tiered-cxl node:2,3 --tiered-cxl-size 36GB" in suggestion.command


def test_devdax_is_suggested_where_no_node_is(good: Facts) -> None:
    """The whole device; one that is in use as a node is passed over."""
    used = DaxDevice("dax0.0", GB, 2**21, 1, is_system_ram=True)
    free = DaxDevice("dax1.0", GB, 2**21, 2, is_system_ram=False)
    assert advice.cxl_advice(replace(good, dax_devices=[used])) is None
    suggestion = advice.suggest(replace(good, dax_devices=[used, free]))
    assert suggestion is not None
    assert "--tiered-cxl /dev/dax1.0" in suggestion.command
    assert "--tiered-cxl-size" not in suggestion.command


def test_a_full_node_is_no_candidate(good: Facts) -> None:
    """Less than one GB is not worth a tier."""
    facts = replace(good, numa_nodes=[NumaNode(1, "", 40 * GB, GB)])
    assert advice.cxl_advice(facts) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": None, "seams": (), "detail": "SGLang is gone"}, "SGLang is gone."),
        ({"plugin_registered": False}, "plugin is not installed"),
        (
            {"version": "0.6.0", "seams": (SeamFacts("pool", False, "x.y is gone"),)},
            "lacks 1 of 1 things that the plugin needs (first: x.y is gone); "
            "install sglang==0.5.23",
        ),
        (
            {"seams": (SeamFacts("pool", False, "x.y is gone"),)},
            "check its installation",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_an_obstacle(
    good: Facts, change: dict[str, object], words: str
) -> None:
    """Each says what is wrong and what to do."""
    facts = replace(good, engine=replace(good.engine, **change))
    (obstacle,) = advice.obstacles(facts, {})
    assert words in obstacle


def test_no_accelerator_needs_our_platform(good: Facts) -> None:
    """It must be installed, and SGLANG_PLUGINS must not leave it out."""
    facts = replace(good, accelerator=NO_GPU)
    assert advice.obstacles(facts, {}) == []
    (obstacle,) = advice.obstacles(facts, {"SGLANG_PLUGINS": "sgl_tiered"})
    assert "leaves the CPU platform out" in obstacle
    without = replace(facts, engine=replace(good.engine, platform_registered=False))
    (obstacle,) = advice.obstacles(without, {})
    assert "pip install sgl-tiered-platform" in obstacle


def test_a_whitelist_without_the_plugin_is_an_obstacle(good: Facts) -> None:
    """SGLang would start plain and say nothing."""
    (obstacle,) = advice.obstacles(good, {"SGLANG_PLUGINS": "other"})
    assert "SGLANG_PLUGINS leaves the plugin out" in obstacle
    both = {"SGLANG_PLUGINS": "other, sgl_tiered"}
    assert advice.obstacles(good, both) == []


def test_too_little_memory_is_an_obstacle_and_has_no_suggestion(good: Facts) -> None:
    """Nothing is suggested that could not start."""
    memory = MemoryFacts(8 * GB, GB, None)
    facts = replace(good, memory=memory)
    (obstacle,) = advice.obstacles(facts, {})
    assert "Only 1.0 GB of memory are free" in obstacle
    assert advice.suggest(facts) is None
