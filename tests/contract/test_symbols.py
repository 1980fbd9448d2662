"""Every SGLang symbol that we touch is there, and looks as we use it."""

import pytest

pytestmark = pytest.mark.sglang

KEYWORD = "KEYWORD_ONLY"
VARIADIC = ("VAR_POSITIONAL", "VAR_KEYWORD")


def test_every_seam_is_found(symbols):
    """On the installed SGLang no seam is missing."""
    lost = [
        f"{name}: {detail}" for name, found, detail in symbols["seams"] if not found
    ]
    assert not lost
    assert len(symbols["seams"]) >= 16


def test_the_tested_version_is_installed(symbols):
    """The version that the seams were read from is the one that is tested here."""
    tested, installed = symbols["versions"]
    assert tested == installed


@pytest.mark.parametrize("what", ["method", "function", "class", "hook", "parameter"])
def test_a_missing_symbol_stops_the_plugin(symbols, what):
    """A symbol that is gone or takes other arguments is named with both versions."""
    message = symbols["missing"][what]
    tested, installed = symbols["versions"]
    assert message, f"a missing {what} went unnoticed"
    assert f"SGLang {tested}" in message
    assert f"installed {installed}" in message
    assert message.endswith(".")
    assert "\n" not in message


def test_an_untested_version_whose_symbols_agree_is_warned_of(symbols):
    """A version that looks alike is served with a warning, the tested one without."""
    (warning,), none = symbols["warned"]
    assert symbols["versions"][0] in warning
    assert "0.0.1" in warning
    assert none == []


def test_overridden_methods_take_what_sglang_passes(symbols):
    """Each method that we override can be called as SGLang calls its own."""
    wrong = []
    for name, (theirs, ours) in symbols["overridden"].items():
        named = [p for p in ours if p[1] not in VARIADIC]
        takes_more = {p[1] for p in ours} & set(VARIADIC)
        their_names = [p[0] for p in theirs if p[1] not in VARIADIC]
        for position, (parameter, kind, has_default) in enumerate(named):
            if parameter not in their_names:
                if not has_default:
                    wrong.append(f"{name} wants {parameter}, which SGLang lacks")
            elif kind != KEYWORD and their_names.index(parameter) != position:
                wrong.append(f"{name}: {parameter} stands elsewhere")
        if not takes_more:
            lost = set(their_names) - {p[0] for p in named}
            wrong += [f"{name} does not take {parameter}" for parameter in lost]
    assert not wrong
    assert len(symbols["overridden"]) >= 15


def test_what_we_override_exists(symbols):
    """Public methods of our cache are SGLang's, besides those that only we call."""
    own = {
        "tiered",
        "drop",
        "has_pending_cache_operations",
        "finish_offloads",
        "leave_device",
        "forget_plans",
        "adapter_loaded",
        "weights_changed",
        "weights_changing",
        "take_ends",
        "submit_offload",
        "repair_loads",
        "end_passes",
        "waiting_request",
        "watch_queue",
    }
    # What our prefill adder asks for.
    own |= {"split_end", "resume_split", "keep_back", "undo_back"}
    assert set(symbols["defined"]) - set(symbols["overridden"]) <= own


def test_match_result_has_the_fields_that_we_set(symbols):
    """The fields of a match that we read and replace are there."""
    assert {
        "device_prefix_len",
        "last_device_node",
        "last_host_node",
        "best_match_node",
        "host_hit_length",
        "full_kv_hit_length",
    } <= set(symbols["match_result"])


def test_parameter_objects_have_the_fields_that_we_use(symbols):
    """What SGLang hands to eviction and load carries what we read."""
    assert "num_tokens" in [p[0] for p in symbols["evict_params"]]
    names = {p[0] for p in symbols["load_back_params"]}
    assert {"host_hit_length", "req"} <= names


def test_the_pool_is_rows_of_tokens(symbols):
    """Keys and values of a layer are [slots, heads, head size], one page spare."""
    pool = symbols["pool"]
    assert pool["contiguous"]
    assert len(pool["k"]) == len(pool["v"]) == 3
    for slots, heads, size in pool["k"] + pool["v"]:
        assert slots >= 64
        assert (heads, size) == (2, 8)


def test_the_pool_asks_the_counter_before_each_layer(symbols):
    """A layer's keys and its values are asked for by number before they are read."""
    assert set(symbols["asked_layers"]) == {0, 1, 2}
    assert symbols["asked_layers"] == sorted(symbols["asked_layers"])


@pytest.mark.parametrize("method", ["wait_until", "set_consumer"])
def test_our_counter_can_be_called_like_theirs(symbols, method):
    """Our layer counter takes as many arguments as SGLang's own."""
    theirs, ours = symbols["counter"][method]
    assert len(theirs) == len(ours) == 1


@pytest.mark.parametrize(
    ("backend", "whole", "overlaps"),
    [
        ("breakable", False, True),
        ("disabled", False, True),
        ("full", False, False),
        ("embedding", True, False),
    ],
)
def test_a_load_is_waited_for_whole_only_where_no_layer_is_asked_for(
    symbols, backend, whole, overlaps
):
    """Breakable graphs, the default on CUDA, run attention eagerly.

    One whole graph is preceded by SGLang's own wait, so that nothing overlaps it.
    """
    assert symbols["prefill"][backend] == [whole, overlaps]


def test_forwards_wait_for_offloads_where_hicache_hung(symbols):
    """Several ranks of Blackwell with prefills in breakable graphs; nobody else."""
    joins = symbols["joins"]
    assert [name for name, does in joins.items() if does] == ["2 10 breakable"]
    assert len(joins) > 10


def test_our_counter_has_what_sglang_reads(symbols):
    """Pools and the runners of captured graphs find each attribute that they read."""
    read = set(symbols["counter_reads"])
    assert {"wait_until", "set_consumer", "consumer_index", "num_layers"} <= read
    assert read <= set(symbols["counter_has"])


def test_dense_attention_is_supported(symbols):
    """A dense model with an ordinary pool is not refused."""
    assert symbols["refused"]["supported"] == ""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mamba", "recurrent state"),
        ("window", "sliding-window"),
        ("window of the model", "sliding-window"),
        ("latent", "MLA"),
        ("other pool", "its KV pool is a object"),
    ],
)
def test_untested_models_are_refused_in_one_sentence(symbols, model, words):
    """Models that the tiers were not tested with are refused, with what to do."""
    message = symbols["refused"][model]
    assert words in message
    assert "SomeForCausalLM" in message
    assert "without --radix-cache-backend tiered" in message
    assert message.count(". ") == 0
    assert message.endswith(".")
