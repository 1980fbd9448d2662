"""``sgl-tiered profile``: a server with known attention gives known shares."""

import json

import numpy as np
import pytest

from sgl_tiered.cli import main as cli
from sgl_tiered.cli.profile import (
    make_prompts,
    profile_server,
    read_prompts,
    render,
)
from sgl_tiered.cli.profile_totals import ProfileTotals
from sgl_tiered.cli.profiled_server import AttentionReport, read_report
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.profile import FRACTIONS, SparsityProfile

LAYERS, HEADS, PAGE, LOCAL = 2, 4, 16, 8
NUM_TOKENS = 256


class FakeServer:
    """A server whose queries read token j with the weight that layer and half say.

    Layer 0: all that is far is read alike. Layer 1: the first half's queries read
    token 0 alone, the second half's token 0 and, half as much, token 1.
    """

    def __init__(self):
        self.sent = []
        self.cached = {}
        self.is_on = False
        self.keeps = True
        self.num_skipped = 0
        self.refused = ""
        self.reports = []

    def served(self):
        return {
            "engine": "sglang 0",
            "model": {"name": "m", "page_tokens": PAGE},
            "context_tokens": 1000,
            "pool_tokens": 500,
        }

    def fingerprint(self):
        if self.refused:
            raise ConfigError("--url", self.refused, "do")
        return "ab"

    def tokens(self, text):
        return [ord(letter) for letter in text]

    def begin(self, local_tokens):
        assert local_tokens == LOCAL
        self.is_on = True

    def end(self):
        self.is_on = False

    def prefill(self, prompt, salt):
        assert self.is_on
        first = self.cached.get(salt, 0) if self.keeps else 0
        self.sent.append((len(prompt), salt))
        self.cached[salt] = len(prompt) // PAGE * PAGE
        self.reports.append(report(first, len(prompt)))

    def report(self):
        found = self.reports[-1]
        if self.num_skipped:
            return report(found.first, found.mass.shape[1], self.num_skipped)
        return found


def report(first, num_tokens, num_skipped=0):
    mass = np.zeros((LAYERS, num_tokens))
    num_queries = num_tokens - first
    far = np.clip(num_tokens - LOCAL - np.arange(num_tokens), 0, num_queries)
    mass[0] = far / 100.0
    mass[1, 0] = num_queries
    if first:
        mass[1, 1] = num_queries / 2
    visible = num_queries * first + num_queries * (num_queries + 1) // 2
    small = np.full((LAYERS, HEADS), visible // 2)
    small[1] = visible
    return AttentionReport(2, first, num_queries, num_skipped, visible, small, mass)


@pytest.fixture
def server():
    return FakeServer()


def measure(server, prompts=([1] * NUM_TOKENS, [2] * 100)):
    return profile_server(server, prompts, LOCAL, lambda text: None, created="now")


def test_known_attention_gives_known_shares(server):
    """Shares, curves and facts are those of the server; all sums are ended."""
    profile, notes = measure(server)
    assert notes == []
    assert (profile.num_prompts, profile.num_tokens) == (2, NUM_TOKENS + 100)
    assert (profile.model, profile.fingerprint, profile.engine) == (
        "m",
        "ab",
        "sglang 0",
    )
    np.testing.assert_allclose(profile.small_share[0], 0.5, atol=1e-3)
    np.testing.assert_allclose(profile.small_share[1], 1.0)
    # Layer 1: one token of the first half's, two of the second half's.
    later, tenth = profile.held_later, FRACTIONS.index(0.1)
    np.testing.assert_allclose(later[1, tenth], 1.0)
    assert 0.05 < later[0, tenth] < 0.2
    assert profile.held_by_top[0, tenth] < 0.25
    np.testing.assert_allclose(profile.held_by_top[1, tenth], 1.0)
    assert not server.is_on


def test_a_prompt_runs_by_halves_under_a_salt_of_its_own(server):
    """First half, then all of it; nothing is shared with other prompts or runs."""
    measure(server)
    sizes = [size for size, _ in server.sent]
    salts = [salt for _, salt in server.sent]
    assert sizes == [128, 256, 48, 100]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert len(set(salts)) == 2


def test_later_text_is_ranked_by_what_was_read_before(server):
    """A token that only the second half reads is not among the first ones kept."""
    front, rest = report(0, 128), report(128, 256)
    # Token 100 is read by nobody before, and by all afterwards.
    rest.mass[1] = 0
    rest.mass[1, [0, 100]] = 1.0, 3.0
    totals = ProfileTotals(LOCAL)
    totals.add(front, rest)
    facts = {"model": "m", "fingerprint": "", "engine": "", "created": ""}
    profile, _ = totals.profile(**facts)
    assert profile.held_later[1, FRACTIONS.index(0.1)] == pytest.approx(0.25)
    assert profile.held_later[1, FRACTIONS.index(0.9)] == pytest.approx(1.0)
    # Known afterwards, both of them are among the heaviest.
    assert profile.held_by_top[1, FRACTIONS.index(0.1)] == pytest.approx(1.0)


def test_a_lost_first_half_is_noted(server):
    """Without a cache there is no curve of later text, no token counts twice, and a
    note says so."""
    server.keeps = False
    profile, notes = measure(server)
    assert profile.held_later is None
    assert profile.num_tokens == NUM_TOKENS + 100
    np.testing.assert_allclose(profile.small_share[1], 1.0)
    assert [note for note in notes if "2 of 2 prompts" in note]
    text = "\n".join(render(profile, notes))
    assert "note: 2 of 2 prompts" in text


def test_long_share_is_of_all_attention(server):
    """Layer 1 gives one head's worth per query in the first half, 1.5 in the second."""
    profile, _ = measure(server, [[1] * NUM_TOKENS])
    assert profile.long_share[1] == pytest.approx((1 + 1.5) / 2 / HEADS)


def test_somebody_else_is_noticed(server):
    """Passes that were not ours, or queries that are missing, end it in a sentence."""
    server.num_skipped = 2
    with pytest.raises(ConfigError, match="nobody else"):
        measure(server)
    assert not server.is_on
    server.num_skipped = 0
    server.report = lambda: report(0, 64)
    with pytest.raises(ConfigError, match="64 queries from 0 on"):
        measure(server)


def test_a_server_that_cannot_be_profiled_says_why(server):
    """The reason is the server's own."""
    server.refused = "attention is measured by the CPU backend only"
    with pytest.raises(ConfigError, match="CPU backend only"):
        measure(server)
    assert server.sent == []


def test_a_prompt_without_a_far_half_is_refused(server):
    """Nothing in it is far from anything."""
    with pytest.raises(ConfigError, match="prompt 1 has 17 tokens"):
        measure(server, [[1] * 17])
    assert not server.is_on


def test_the_table_has_a_line_per_layer(server):
    """Mean, range, long share and curves of each layer."""
    lines = render(measure(server)[0], ["be careful"])
    assert len([line for line in lines if line.split()[0].isdigit()]) == LAYERS
    assert "100.0%" in lines[-2]
    assert lines[-1] == "note: be careful"


def test_prompts_fit_the_server(server):
    """No prompt is longer than asked for, nor than pool and context leave room for."""
    given = ["a" * 900, [5, 6, 7]]
    first, second = make_prompts(server, given, 9, 800, 0)
    assert len(first) == 500 - PAGE - 1
    assert second == [5, 6, 7]
    assert len(make_prompts(server, given, 9, 100, 0)[0]) == 100
    ours = make_prompts(server, None, 3, 200, 0)
    assert [len(prompt) for prompt in ours] == [200] * 3
    assert ours == make_prompts(server, None, 3, 200, 0)
    assert ours != make_prompts(server, None, 3, 200, 1)


def test_a_file_of_prompts(tmp_path):
    """Texts and lists of ids, one per line; anything else is refused by its line."""
    path = tmp_path / "p.jsonl"
    path.write_text('"a text"\n\n[1, 2]\n')
    assert read_prompts(path) == ["a text", [1, 2]]
    for line in ("{}", "plain", "[1, -2]", "[true]", '""', "[]", '["a"]'):
        path.write_text(f'"a"\n{line}\n')
        with pytest.raises(ConfigError, match="line 2"):
            read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")


def test_a_report_of_other_words_is_refused():
    """A server of another version is told so."""
    with pytest.raises(ConfigError, match="other words"):
        read_report({"mass": ["!"]})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "{dir}/none/p.json"], "--out"),
        (["--out", "{dir}/p.json", "--plot", "{dir}/none/p.png"], "--plot"),
        (["--out", "{dir}/p.png"], "plot's name"),
        (["--out", "{dir}/p.json", "--local", "-1"], "--local"),
        (["--out", "{dir}/p.json", "--tokens", "0"], "--tokens"),
        (["--out", "{dir}/p.json", "--model", "{dir}"], "config.json"),
        (["--out", "{dir}/p.json", "--prompts", "{dir}/none"], "--prompts"),
        (["--out", "{dir}/p.json", "--url", "nowhere"], "no address"),
    ],
)
def test_wrong_settings_end_in_one_sentence(tmp_path, capsys, flags, words):
    """Exit code 2 before anything is measured."""
    given = [flag.replace("{dir}", str(tmp_path)) for flag in flags]
    if "--model" not in given and "--url" not in given:
        given += ["--url", "http://127.0.0.1:9"]
    assert cli.main(["profile", *given]) == 2
    assert words in capsys.readouterr().err


def test_the_file_and_the_plot_are_written(server, tmp_path, monkeypatch, capsys):
    """One file for the solver, one picture for people."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "sgl_tiered.cli.profile.ProfiledServer", lambda url, *keys: server
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps([1] * NUM_TOKENS) + "\n")
    out = tmp_path / "p.json"
    code = cli.main(
        [
            *("profile", "--url", "http://127.0.0.1:9", "--out", str(out)),
            *("--prompts", str(prompts), "--local", str(LOCAL)),
        ]
    )
    assert code == 0
    assert SparsityProfile.load(out).num_tokens == NUM_TOKENS
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out
