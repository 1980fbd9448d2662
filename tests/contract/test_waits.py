"""What holds the scheduler's thread on each way of a page: nothing, on plain tiers.

Counted are the calls that would wait for a CUDA device, over SGLang's real scheduler
and the loop of its overlap schedule (``waits_program.py``). Waits for other threads are
told apart: a launch waits until the loader has queued the copies, not until they run.
"""

import functools
import json

import pytest

from sgl_tiered.pipelines.stream_pool import LoadWay
from tests.contract import count_waits
from tests.contract.count_waits import STORIES, places, summary
from tests.contract.story_support import CORES, FOLDER, output_of

pytestmark = pytest.mark.sglang

QUEUEING = (
    "pipelines/layerwise_load.py:_block_until",
    "pipelines/layerwise_load.py:wait_queued",
    "pipelines/fetch.py:cancel",
)
"""Where a launch, or who takes slots back, waits for the loader to have queued."""
LOAD_ENDS = "results: pipelines/layerwise_load.py:wait"
"""Results are taken once the loads that they rest on are known to be good."""
NAP = "idle: pipelines/completions.py:wait"
"""With nothing launched, the thread naps while the disk is read."""
LAYERWISE = {
    "cpu engines/sglang/layered/cache.py:_take_slots",
    "cpu engines/sglang/layered/pool.py:forget",
    "cpu engines/device/tokens.py:page_numbers",
    "index of the host engines/device/tokens.py:device_pages",
}
LAYERWISE_CUDA = {
    "cpu engines/sglang/layered/flashinfer.py:_pages_of",
    "cpu engines/sglang/layered/pool.py:forget",
}
SPARSE = {
    "cpu engines/sglang/sparse/allocator.py:_pages",
    "cpu engines/sglang/sparse/allocator.py:_release_page_ids",
    "cpu engines/sglang/sparse/cache.py:_hold",
    "cpu engines/sglang/sparse/cache.py:_take_slots",
    "cpu engines/device/tokens.py:page_numbers",
    "index of the host engines/device/tokens.py:device_pages",
}


@functools.cache
def told(story, core="rust"):
    """Return what a story tells; one line of JSON says what was counted in it."""
    return output_of("waits_program.py", story, core, FOLDER)


def show(capsys, story, core="rust"):
    """Return what a story tells, and print what was counted."""
    seen = told(story, core)
    counted = {
        path: sum(places.values())
        for path, places in seen["host_waits_on_scheduler"].items()
    }
    line = {"story": story, "core": core, "host_waits_on_scheduler": counted}
    with capsys.disabled():
        print("\n" + json.dumps(line))
    return seen


PLAIN = [("plain", "rust"), ("plain", "python"), ("ahead", "rust"), ("split", "rust")]


@pytest.fixture(params=PLAIN, ids=" ".join)
def plain(request):
    """A story of plain tiers, and what it tells."""
    return request.param, told(*request.param)


def test_no_host_wait_on_plain_tiers(plain, capsys):
    """Neither in the product's code, nor in SGLang's where that was led there."""
    story, seen = plain
    show(capsys, *story)
    assert seen["core"] == CORES[story[1]]
    assert seen["is_overlapped"]
    none = {path: {} for path in seen["moved"]}
    assert seen["host_waits_on_scheduler"] == none
    assert seen["in_sglang_for_ours"] == none
    # To pin memory may hold the thread until the device is idle.
    assert seen["pinned_allocations"] == none


def test_stats_say_how_layers_are_loaded(plain):
    """Of the ways that a device with streams has; on the CPU platform nothing does."""
    _, seen = plain
    assert seen["served"]["loads_by"] in {way.value for way in LoadWay}
    assert "loads_by" not in told("layerwise")["served"]


def test_nobody_waits_for_a_device_that_stands_still(plain):
    """It runs only while results are taken: not through other threads either."""
    _, seen = plain
    assert seen["held"] == []
    for path in seen["waits_for_threads"].values():
        in_flight = {place for place in path if place not in (LOAD_ENDS, NAP)}
        assert {place.partition(": ")[2] for place in in_flight} <= set(QUEUEING)


def test_answers_are_those_of_their_prompts(plain):
    """Whatever was loaded, evicted, retracted or aborted meanwhile."""
    _, seen = plain
    assert seen["wrong"] == []
    assert set(seen["ends"]) <= {"length", "abort"}


@pytest.mark.parametrize("core", CORES)
def test_each_way_was_taken(core):
    """Else it would be no wonder that nothing was counted."""
    moved = told("plain", core)["moved"]
    whole = 4 * 7
    assert moved["offload"]["device->host"] == whole
    assert moved["hit from host"]["host->device"] == whole
    assert moved["hit from disk"]["disk->host"] == whole
    assert moved["hit from disk"]["host->device"] == whole
    assert moved["hit from disk beside a prefill"]["disk->host"] == whole
    assert moved["queue"]["host->device"] == whole
    assert moved["chunks behind a hit"]["host->device"] == 7
    assert moved["eviction"]["device->host"] == 12 * 15
    assert moved["retraction"]["retracted"] > 0
    assert moved["prefetch to host"]["promoted_pages"] > 0
    assert moved["prefetch to device"]["fetched_pages"] > 0
    assert moved["aborted while it loads"]["host->device"] > 0
    assert moved["prefetch taken back"]["fetches_cancelled"] > 0
    assert moved["aborted while it is fetched"]["fetches_cancelled"] > 0
    assert moved["hit from host, late"]["host->device"] == whole


def test_offloads_ahead_were_made():
    """And what they brought down was a hit."""
    moved = told("ahead")["moved"]
    assert moved["offload ahead"]["device->host"] > 0
    assert moved["hit from host"]["host->device"] > 0


def test_a_prompt_was_split():
    """Its front was computed, and its back put behind that."""
    moved = told("split")["moved"]["split"]
    assert moved["decisions_split"] == 1
    assert 0 < moved["host->device"] < 40


def test_planted_waits_are_caught(capsys):
    """Each of them, twice: one for each request; and none where nothing is planted."""
    seen = show(capsys, "planted")
    waits = dict(seen["host_waits_on_scheduler"])
    assert waits.pop("nothing") == {}
    # It waits for no device, and is told with the threads.
    assert waits.pop("sleep") == {}
    assert "_page_numbers" in str(seen["waits_for_threads"]["sleep"])
    for path, found in waits.items():
        assert list(found.values()) == [2], path
        (place,) = found
        assert place.endswith(" engines/sglang/cache.py:_page_numbers"), path


def test_the_summary_says_what_the_stories_say():
    """And a wait, or a plant that is not seen, is not hidden by it."""
    seen = {name: told(*name.split()) for name in STORIES}
    found = summary(seen)
    assert found["host_waits_on_scheduler"] == found["pinned_allocations"] == 0
    assert found["held"] == 0
    assert found["not_taken"] == []
    assert set(found["layerwise"]) == LAYERWISE | LAYERWISE_CUDA
    assert set(found["sparse"]) == SPARSE
    assert found["planted_caught"]
    planted = seen["planted rust"]
    waits = {**planted["host_waits_on_scheduler"], "item": {}}
    blind = {**planted, "host_waits_on_scheduler": waits}
    assert not summary({**seen, "planted rust": blind})["planted_caught"]
    worse = {**seen["split rust"], "host_waits_on_scheduler": {"split": {"item a": 2}}}
    assert summary({**seen, "split rust": worse})["host_waits_on_scheduler"] == 2
    still = {**seen["split rust"], "moved": {"offload": {}, "split": {"cached": [0]}}}
    found = summary({**seen, "split rust": still})
    assert found["not_taken"] == ["split rust: offload", "split rust: split"]


def test_the_program_ends_with_the_summary(monkeypatch, capsys):
    """`make host-waits`: status 0 where nothing waits and every plant is seen."""
    seen = {name: told(*name.split()) for name in STORIES}
    monkeypatch.setattr(count_waits, "told_by", seen.__getitem__)
    assert count_waits.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == list(STORIES)
    assert json.loads(lines[-1]) == summary(seen)
    waits = {"offload": {"item a": 1}}
    seen["plain rust"] = {**seen["plain rust"], "host_waits_on_scheduler": waits}
    assert count_waits.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary(seen)


def test_a_story_that_takes_too_long_is_told_in_the_last_line(monkeypatch, capsys):
    """As one that fails is: whoever reads that line finds JSON there."""
    monkeypatch.setattr(count_waits, "_TIMEOUT_S", 0.01)
    assert count_waits.main() == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": f"the story {STORIES[0]!r} did not end well"
    }
    assert "not done" in captured.err


def test_where_cuda_pins_nothing_a_launch_waits_for_the_forward_before(capsys):
    """A known limit, and what shows that such a wait is seen: through the loader."""
    seen = show(capsys, "unpinned")
    (held,) = seen["held"]
    assert held["scheduler"][0] == QUEUEING[0]
    assert held["tiered-load-0"][0] == "pipelines/page_numbers.py:on_host"
    assert seen["wrong"] == []


@pytest.mark.parametrize(
    ("story", "wanted"),
    [
        ("layerwise", LAYERWISE),
        ("layerwise_cuda", LAYERWISE_CUDA),
        ("sparse", SPARSE),
    ],
)
def test_places_that_wait_where_kv_is_placed_singly(story, wanted, capsys):
    """Layer-wise and sparse KV know each page on the host; they refuse the overlap."""
    seen = show(capsys, story)
    found = places(seen)
    with capsys.disabled():
        print(json.dumps(sorted(found)))
    assert found == wanted
    assert not seen.get("is_overlapped")
