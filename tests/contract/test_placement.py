"""Attention over layers that lie here and there equals that over SGLang's own pool."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

STORIES = [f"{retain} {seed}" for retain in (None, 0, 1, 3) for seed in range(4)]
ACTS = [f"act {share} {one}" for share in (0.5, 1.0) for one in (1, 2, 3, "some")]


@pytest.fixture(scope="module")
def told():
    """The stories of the program."""
    return output_of("placement_program.py")


@pytest.mark.parametrize("name", STORIES + ACTS)
def test_outputs_are_equal_bit_for_bit(told, name):
    """Prefills, chunks, shared prefixes and decode steps, whatever is retained."""
    assert told[name]["passes"] > 20
    assert told[name]["differ"] == 0


@pytest.mark.parametrize("name", STORIES + ACTS)
def test_nothing_is_lost(told, name):
    """All ended, every layer-page and every slot is free again."""
    assert told[name]["free"] == told[name]["total"]
    assert told[name]["free_slots"] == told[name]["slots"]


def test_layers_were_streamed(told):
    """The stories with fewer layers retained would show nothing else."""
    stories = [told[f"0 {seed}"] for seed in range(4)]
    assert all(story["offloaded"] > 0 for story in stories)
    assert sum(story["streamed"] > 0 for story in stories) >= 3


@pytest.mark.parametrize("name", ACTS)
def test_activations_come_back_too(told, name):
    """Their places and rows, once all have ended."""
    acts = told[name]["acts"]
    assert acts["free"] == acts["total"]
    assert acts["free_rows"] == acts["rows"]
    assert acts["pages"] > 0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_activations_were_rebuilt(told, share):
    """Else the stories would show nothing; and the link has carried less."""
    stories = [told[f"act {share} {seed}"]["acts"] for seed in (1, 2, 3)]
    assert sum(story["rebuild_s"] > 0 for story in stories) >= 2
    assert sum(story["saved"] for story in stories) > 0
    pages, kv = (
        sum(story[kind] for story in stories) for kind in ("pages", "kv_pages")
    )
    assert (pages > 4 * kv) == (share == 1.0)


@pytest.mark.parametrize("name", ["broken", "broken act"])
def test_broken_staging_is_seen(told, name):
    """The comparison can fail."""
    assert told[name]["differ"] > 0


def test_what_cannot_be_translated_is_refused(told):
    """In a sentence, and not with wrong KV."""
    assert len(told["refused"]) == 3
    for sentence in told["refused"].values():
        assert sentence.startswith("EngineCompatibilityError")
        assert "--tiered-layerkv" in sentence
