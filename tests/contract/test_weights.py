"""KV below the device is found by what computed it, however SGLang changes weights."""

import pytest

from tests.contract.story_support import FOLDER, output_of

pytestmark = pytest.mark.sglang

PAGES = 4
"""Of each prompt in the program; None stands for: nothing is looked up."""
HARMLESS = {
    # Nothing of these touches a weight.
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "get_weights_by_name",
    "save_remote_model",
    "save_sharded_model",
    # Fields and functions that the manager is given.
    "flush_cache",
    "is_fully_idle",
    "memory_saver_adapter",
    "metrics_collector",
    "offload_tags",
    "scheduler",
    "stashed_model_static_state",
    "tp_cpu_group",
    "tp_worker",
    "draft_worker",
}


@pytest.fixture(scope="module")
def told():
    """What the program saw, by story."""
    return output_of("weights_program.py", FOLDER)


def test_every_method_of_sglangs_manager_is_watched_or_known(told):
    """A method that a new SGLang adds is looked at before it is served with."""
    assert set(told["methods"]) - HARMLESS == set(told["watched"])


def test_new_weights_are_not_kept_as_the_old_ones(told):
    """Flush, then update without one: a restart with the old ones finds nothing."""
    assert told["flushed_first"] == {
        "by the new": PAGES,
        "by the old after a restart": 0,
    }


def test_a_restart_with_updated_weights_finds_their_pages(told):
    """The folder is marked with the weights in force, not with those of the start."""
    assert told["updated_and_restarted"] == {
        "at once": None,
        "of the old": 0,
        "after a restart": PAGES,
    }


def test_without_a_flush_nothing_of_the_device_is_kept(told):
    """It has KV of both; a flush ends that, and then all is as ever."""
    found = told["not_flushed"]
    assert found["mixed"]
    assert found["before a flush"] is None
    assert found["still used"] == found["used"]
    assert found["skipped"] > 0
    assert found["after a flush"] == [0, PAGES]
    assert found["restarted"] == [0, PAGES]


def test_the_same_weights_once_more_change_nothing(told):
    """What was kept is found again as soon as they have been read."""
    assert told["not_flushed_and_the_same"] == {
        "at once": None,
        "read": PAGES,
        "goes on": PAGES,
    }


def test_weights_are_unknown_while_a_session_is_open(told):
    """Whatever was loaded or flushed within it; a call without one is refused."""
    assert told["in_a_session"] == {
        "refused": False,
        "unchanged": PAGES,
        "begun": None,
        "within": None,
        "over": 0,
        "restarted with 3.0": PAGES,
        "restarted with 2.0": 0,
    }


def test_no_way_to_change_weights_is_missed(told):
    """Broadcasts, IPC, a peer's writes within a session, SGLang's own check."""
    looks = told["by_every_way"].pop("a check that only looks")
    assert looks == [PAGES, PAGES]
    assert len(told["by_every_way"]) == 4
    assert all(found == [PAGES, None] for found in told["by_every_way"].values())


def test_an_update_that_failed_may_have_changed_weights(told):
    """SGLang flushes nothing then."""
    assert told["failed"] == {"success": False, "found": None}


def test_weights_that_are_away_are_not_read(told):
    """They are once they are back, and then what they computed is found again."""
    found = told["released"]
    assert found["away"] is None
    assert found["back"] == PAGES
    assert found["flushed"] is None
    assert found["back again"] == [0, PAGES]
    assert found["others' memory"] == PAGES
    assert [len(paused) for paused in found["reads"]] == [2, 4]


def test_a_request_that_waits_gets_nothing_of_the_old_weights(told):
    """Its plan is gone, what it held is free, and it does not wait."""
    assert told["waiting"] == {
        "before": 16 * PAGES,
        "while they are read": 0,
        "a state is left": False,
        "goes at once": True,
        "after": 0,
        "pinned": 0,
    }


def test_what_was_put_off_is_not_copied_after_a_change(told):
    """The device may have other KV for the same tokens by then."""
    assert told["put_off"] == {"of the old": 0, "of the new": PAGES}


def test_an_adapter_trained_anew_finds_nothing_of_the_one_before(told):
    """Same id, name and path; the disk was kept."""
    assert told["adapters"] == {
        "served": PAGES,
        "the same": PAGES,
        "without it": 0,
        "trained anew": 0,
    }


def test_an_adapter_that_was_trained_on_is_not_kept_as_the_former(told):
    """Nor the former as itself: the device has KV of both under one id."""
    assert told["adapter_while_it_runs"] == {
        "put off": 1,
        "the same": [0, 1],
        "trained on": [None, 0],
        "others": 0,
        "flushed": 0,
        "computed anew": 1,
    }


def test_a_decode_server_hears_of_kv_that_others_weights_computed(told):
    """A prefill server's, and its own of before, which SGLang kept in host memory."""
    assert told["of_other_instances"] == {
        "of the same": [True, True, True],
        "updated": True,
        "kept from before": [False, True],
        "flushed": True,
        "of others": [False, True],
    }
