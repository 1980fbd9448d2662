"""The tiers' KV events have the shapes and the names of SGLang's own."""

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.router.events import apply, decode
from sgl_tiered.router.tree import PromptTree, keys_of, root_key
from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

PAGE = 4
PROMPT = list(range(100, 100 + 4 * PAGE))
MEDIA = {"CPU_PINNED", "CXL", "DISK"}


@pytest.fixture(scope="module")
def stories():
    """What was published of a prompt under each kind of key."""
    return output_of("tier_events_program.py")


@pytest.mark.parametrize("name", ["plain", "salt", "lora", "dynamo"])
def test_names_and_fields_are_those_of_the_devices_events(stories, name):
    """But for the medium, field by field."""
    story = stories[name]
    device = {event["type"]: event for event in story["device"][1]}
    wanted = device["BlockStored"]
    stored = story["stored"][1]
    assert {event["medium"] for event in stored} == MEDIA
    for event in stored:
        assert {**event, "medium": "GPU"} == wanted
    assert story["removed"][1] == [{**device["BlockRemoved"], "medium": "CPU_PINNED"}]
    assert story["nothing"] == 0


def test_a_key_that_events_cannot_say_is_not_told(stories):
    """A router would take the pages for anybody's."""
    assert stories["secret"]["stored"][1] == []
    assert stories["secret"]["removed"][1] == []


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("plain", {}),
        ("salt", {"cache_salt": "tenant"}),
        ("lora", {"lora": "adapter"}),
    ],
)
def test_a_router_follows_them_below_the_device(stories, name, names):
    """Stored on the device and below; what the device gives up is found below."""
    story, tree = stories[name], PromptTree()
    holder = tree.add_holder("a", PAGE)

    def hear(batch: str) -> None:
        for event in decode(bytes.fromhex(batch)):
            assert apply(tree, holder, event) == 0, "an orphan"

    def pages():
        keys = keys_of(root_key("tokens", PAGE, **names), PROMPT, PAGE)
        (match,) = tree.match(keys).values()
        return {TierId(at).label: n for at, n in enumerate(match.pages) if n}

    hear(story["stored"][0])
    assert pages() == {"host": 4}
    hear(story["device"][0])  # stored there, and given up again
    assert pages() == {"host": 4}
    hear(story["removed"][0])
    assert pages() == {"cxl": 4}
