"""The frontend programs run on SGLang's own frontend, against a server that counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.programs.__main__ import PROGRAMS, main
from sgl_tiered_workloads.programs.frontend import FrontendError, Meter, connect

pytestmark = pytest.mark.sglang

SMALL = {
    "few-shot": {"examples": 2, "questions": 3},
    "tree-of-thought": {"problems": 1, "branches": 2, "levels": 2, "thought_tokens": 4},
    "multi-turn": {"users": 2, "turns": 2, "system_rules": 2, "answer_tokens": 4},
}


class Recorder:
    """A stand-in for a server: a token a character, cached as far as it was seen."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.told: list[int] = []
        self.broken = False
        self._lock = threading.Lock()

    def generate(self, body: dict[str, Any]) -> Any:
        if isinstance(body["text"], list):
            return [self._one(text, body) for text in body["text"]]
        return self._one(body["text"], body)

    def _one(self, prompt: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            cached = max((_shared(prompt, old) for old in self.prompts), default=0)
            self.prompts.append(prompt)
            self.told.append(cached)
        drawn = body["sampling_params"]["max_new_tokens"]
        meta = {
            "prompt_tokens": len(prompt),
            "completion_tokens": min(drawn, 4),
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0},
            "finish_reason": {"type": "length"},
            # The longer the ending, the less likely: a choice that is not random.
            "input_token_logprobs": [[-float(len(prompt)), 1, "x"]] * 2,
            "output_token_logprobs": [],
        }
        return {"text": " yes"[:drawn], "meta_info": meta}


def _shared(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )


@pytest.fixture
def server() -> Iterator[tuple[str, Recorder]]:
    """A running stand-in and its address."""
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"model_path": "stand-in"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if recorder.broken:
                self._answer({"error": "out of tokens"}, 500)
            else:
                self._answer(recorder.generate(body))

        def _answer(self, content: Any, status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}", recorder
    http.shutdown()
    thread.join()
    http.server_close()


def run(name: str, url: str, out: Path, seed: int = 3) -> dict[str, Any]:
    sizes = [
        word
        for size, value in SMALL[name].items()
        for word in ("--" + size.replace("_", "-"), str(value))
    ]
    code = main([name, "--url", url, "--seed", str(seed), "--out", str(out), *sizes])
    assert code == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_reports_what_the_server_told(
    name: str, server: tuple[str, Recorder], tmp_path: Path
) -> None:
    """Every request counts, those of select and fork too; nothing else does."""
    url, recorder = server
    report = run(name, url, tmp_path / "report.json")
    assert report["requests"] == len(recorder.prompts)
    assert report["usage"]["prompt_tokens"] == sum(map(len, recorder.prompts))
    assert report["usage"]["cached_tokens"] == sum(recorder.told)
    assert report["cached_share"] == pytest.approx(
        sum(recorder.told) / sum(map(len, recorder.prompts))
    )
    assert report["usage"]["cached_by_tier"]["device"] == sum(recorder.told)
    assert report["seconds"] > 0


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_equal_seeds_send_equal_prompts(
    name: str, server: tuple[str, Recorder], tmp_path: Path
) -> None:
    """A second run sends the same prompts, another seed does not."""
    url, recorder = server
    sent = []
    for seed in (3, 3, 4):
        recorder.prompts.clear()
        run(name, url, tmp_path / "report.json", seed)
        sent.append(sorted(recorder.prompts))
    assert sent[0] == sent[1]
    assert sent[0] != sent[2]


def test_few_shot_shares_its_template_and_chooses_labels(
    server: tuple[str, Recorder], tmp_path: Path
) -> None:
    """All requests begin alike; each answer is one of the labels."""
    url, recorder = server
    report = run("few-shot", url, tmp_path / "report.json")
    template = recorder.prompts[0].rpartition("Sentence:")[0]
    assert template.count("Sentiment:") == SMALL["few-shot"]["examples"]
    assert all(prompt.startswith(template) for prompt in recorder.prompts)
    assert len(report["answers"]) == SMALL["few-shot"]["questions"]
    assert set(report["answers"]) <= {"positive", "negative"}


def test_a_tree_of_thought_goes_on_from_the_best_branch(
    server: tuple[str, Recorder], tmp_path: Path
) -> None:
    """The chain holds one step per level: the branch that was judged best."""
    url, _ = server
    (chain,) = run("tree-of-thought", url, tmp_path / "report.json")["answers"]
    assert chain.count("Step 1, idea 1: yes") == 1
    assert chain.count("Step 2, idea 1: yes") == 1


def test_a_chat_carries_the_turns_before_it(
    server: tuple[str, Recorder], tmp_path: Path
) -> None:
    """A user's second prompt begins with the first one and its answer."""
    url, recorder = server
    run("multi-turn", url, tmp_path / "report.json")
    first, second = recorder.prompts[0], recorder.prompts[2]
    assert second.startswith(first + " yes")


def test_an_absent_server_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Status 2 and the address; no traceback."""
    assert main(["few-shot", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    with pytest.raises(FrontendError):
        connect("http://127.0.0.1:9", Meter())


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_server_that_breaks_is_one_sentence(
    name: str, server: tuple[str, Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    """What happens in a program's own thread is not lost there."""
    url, recorder = server
    recorder.broken = True
    assert main([name, "--url", url]) == 2
    assert "broke off at the server" in capsys.readouterr().err
