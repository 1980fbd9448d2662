"""The generators are seeded, causal and of the sizes that they promise."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import (
    ChatShape,
    PlannedRequest,
    chat_sessions,
    cyclic_working_set,
    no_reuse,
    random_tokens,
    replay,
    shared_prefix,
    swap_page,
)

SHAPE = ChatShape(3, 3, 32, 64, 8, 4)
VOCAB = 500


def generator(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    """A chat workload is a function of its seed."""
    one, same, other = (
        [session.messages for session in chat_sessions(SHAPE, generator(seed), VOCAB)]
        for seed in (5, 5, 6)
    )
    assert one == same
    assert one != other


def test_a_turn_carries_the_models_own_earlier_answers() -> None:
    """Turn t+1 is turn t's prompt, the given answer, and the new message."""
    session = chat_sessions(SHAPE, generator(), VOCAB)[0]
    first = session.next_request()
    session.record_answer([9, 8, 7, 6])
    second = session.next_request()
    assert second.prompt == (*first.prompt, 9, 8, 7, 6, *session.messages[1])
    assert second.key == "s0.t1"


def test_a_turn_cannot_be_asked_for_before_the_last_one_is_answered() -> None:
    """A session is causal: it refuses to run ahead of the model."""
    session = chat_sessions(SHAPE, generator(), VOCAB)[0]
    session.next_request()
    with pytest.raises(RuntimeError, match="unanswered"):
        session.next_request()


def test_a_session_ends_after_its_turns() -> None:
    """After the last answer a session is finished and gives no more turns."""
    session = chat_sessions(SHAPE, generator(), VOCAB)[0]
    for _ in range(SHAPE.num_turns):
        assert not session.finished
        session.next_request()
        session.record_answer([7])
    assert session.finished
    with pytest.raises(RuntimeError, match="finished"):
        session.next_request()


def test_sessions_share_the_system_prompt_and_nothing_after_it() -> None:
    """The shared prefix of two sessions is the system prompt."""
    a, b, _ = (
        s.next_request().prompt for s in chat_sessions(SHAPE, generator(), VOCAB)
    )
    assert a[: SHAPE.system_tokens] == b[: SHAPE.system_tokens]
    assert a[SHAPE.system_tokens :] != b[SHAPE.system_tokens :]


def test_working_set_counts_the_distinct_tokens_of_all_sessions() -> None:
    """The stated working set is the system prompt and all that is not shared."""
    sessions = chat_sessions(SHAPE, generator(), VOCAB)
    own = 0
    for session in sessions:
        while not session.finished:
            session.next_request()
            session.record_answer([7] * SHAPE.answer_tokens)
        own += len(session.history) - SHAPE.system_tokens
    assert SHAPE.working_set_tokens == SHAPE.system_tokens + own


def test_random_tokens_are_never_special() -> None:
    """Drawn ids stay between the special tokens and the vocabulary's end."""
    drawn = random_tokens(generator(), 5000, 64)
    assert min(drawn) == 7
    assert max(drawn) == 63


def test_shared_prefix_has_every_user_once_on_its_own_prefix() -> None:
    """Users of one prefix share exactly that prefix; bodies differ."""
    requests = shared_prefix(3, 4, 20, 10, 2, generator(), VOCAB)
    assert sorted(r.key for r in requests) == [
        f"p{p}.u{u}" for p in range(3) for u in range(4)
    ]
    by_prefix: dict[str, set[tuple[int, ...]]] = {}
    for request in requests:
        by_prefix.setdefault(request.key[:2], set()).add(request.prompt[:20])
    assert all(len(prefixes) == 1 for prefixes in by_prefix.values())
    assert len({request.prompt for request in requests}) == 12


def test_cyclic_working_set_has_the_asked_size_and_repeats_in_order() -> None:
    """The set is as many pools as asked, and each round sends it alike."""
    requests = cyclic_working_set(1024, 4.0, 120, 8, 3, generator(), VOCAB)
    assert len(requests) == 3 * 32
    prompts = [request.prompt for request in requests]
    assert prompts[:32] == prompts[32:64] == prompts[64:]
    assert len(set(prompts)) == 32


def test_no_reuse_prompts_share_not_even_a_page() -> None:
    """No two prompts begin with the same 16 tokens."""
    requests = no_reuse(50, 64, 4, generator(), VOCAB)
    assert len({request.prompt[:16] for request in requests}) == 50


def test_replay_sends_the_recorded_prompts_for_as_many_tokens() -> None:
    """A replay forces the recorded schedule, not the replayer's own answers."""
    record = RequestRecord("s0.t1", 3, (1, 2, 3), 0.0, 0.0, output=(4, 5))
    assert replay([record]) == [PlannedRequest("s0.t1", (1, 2, 3), 2)]


def test_swap_page_changes_one_page_and_refuses_what_would_change_nothing() -> None:
    """A damaged prompt differs in exactly the named page, or it is an error."""
    request = PlannedRequest("a", tuple(range(10, 58)), 4)
    donor = tuple(range(100, 148))
    swapped = swap_page(request, donor, 1, 16).prompt
    assert swapped[:16] == request.prompt[:16]
    assert swapped[16:32] == donor[16:32]
    assert swapped[32:] == request.prompt[32:]
    with pytest.raises(ValueError, match="beyond"):
        swap_page(request, donor, 3, 16)
    with pytest.raises(ValueError, match="same"):
        swap_page(request, request.prompt, 1, 16)
