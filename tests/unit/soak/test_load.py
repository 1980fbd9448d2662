"""Rounds of a soak, and how their answers are judged."""

from dataclasses import replace

import pytest
from sgl_tiered_workloads.records import RequestRecord

from tests.soak.judge import Judge
from tests.soak.load import NUM_AGAIN, ROUNDS_BACK, Drawer, Kind, decoders


def answer(planned, token=7, logprob=-0.5, **fields):
    """Return an answer whose every token is the same."""
    num = planned.request.max_new_tokens
    top = ((logprob, token), (-3.0, token + 1))
    return RequestRecord(
        planned.request.key,
        0,
        planned.request.prompt,
        0.0,
        0.0,
        output=(token,) * num,
        top_logprobs=(top,) * num,
        **fields,
    )


def answers(planned, **fields):
    """Return what one server answers to a round."""
    return {p.request.key: answer(p, **fields) for p in planned if p.is_answered}


def test_every_id_is_new_and_salts_come_again_with_their_prompt():
    """Ids never repeat; a salt does with its prompt, some rounds later."""
    drawer = Drawer(1)
    seen, keys = {}, set()
    for number in range(12):
        planned = drawer.next_round()
        assert not keys & {p.request.key for p in planned}
        keys |= {p.request.key for p in planned}
        again = [p for p in planned if p.kind is Kind.AGAIN]
        assert len(again) == (NUM_AGAIN if number >= ROUNDS_BACK[0] else 0)
        for each in again:
            former, at = seen[each.again_of]
            assert (former.prompt, former.salt) == (
                each.request.prompt,
                each.request.salt,
            )
            assert ROUNDS_BACK[0] <= number - at <= ROUNDS_BACK[1]
        new = [p.request for p in planned if p.kind is not Kind.AGAIN]
        assert len({r.salt for r in new}) == len(new)
        assert not {r.salt for r in new} & {r.salt for r, _ in seen.values()}
        seen |= {request.key: (request, number) for request in new}


def test_a_seed_gives_the_same_rounds():
    """A run can be repeated; another seed is another run."""
    rounds = [Drawer(seed) for seed in (3, 3, 4)]
    first, same, other = ([d.next_round() for _ in range(3)] for d in rounds)
    assert first == same
    assert first != other
    assert decoders(3, 0) == decoders(3, 0)
    assert decoders(3, 0) != decoders(3, 1)


def test_equal_answers_are_right():
    """Nothing is wrong where both say the same; reuse is summed by tier."""
    judge, drawer = Judge(), Drawer(1)
    planned = drawer.next_round()
    tiered = answers(planned, cached_by_tier={"host": 16})
    judge.take(planned, {"plain": answers(planned), "tiered": tiered, "planted": {}})
    assert (judge.wrong, judge.judged) == (0, len(tiered))
    assert judge.reused == {"host": 16 * len(tiered)}


@pytest.mark.parametrize("change", [{"token": 9}, {"logprob": -0.9}])
def test_one_other_answer_is_wrong(change):
    """One answer that plain's spread does not explain is counted."""
    judge, drawer = Judge(), Drawer(1)
    planned = drawer.next_round()
    tiered = answers(planned)
    whole = next(p for p in planned if p.is_answered)
    tiered[whole.request.key] = answer(whole, **change)
    judge.take(planned, {"plain": answers(planned), "tiered": tiered})
    assert judge.wrong == 1


def test_plain_itself_says_what_may_move():
    """What plain SGLang moved between two answers to one prompt may move."""
    judge, drawer = Judge(), Drawer(1)
    for number in range(ROUNDS_BACK[0] + 1):
        planned = drawer.next_round()
        moved = -0.5 if number < ROUNDS_BACK[0] else -0.8
        plain = answers(planned, logprob=moved)
        judge.take(planned, {"plain": plain, "tiered": plain})
    assert judge.spread.max_logprob == pytest.approx(0.3)
    assert judge.wrong == 0


def test_failed_requests_are_counted_and_not_judged():
    """An error of either server is one, and leaves nothing to compare."""
    judge, drawer = Judge(), Drawer(1)
    planned = drawer.next_round()
    tiered = answers(planned)
    key = next(iter(tiered))
    tiered[key] = replace(tiered[key], error="HTTP 500")
    judge.take(planned, {"plain": answers(planned), "tiered": tiered})
    assert judge.errors == {"tiered": 1}
    assert (judge.wrong, judge.judged) == (0, len(tiered) - 1)
