"""Prompts with images: only the device keeps their KV, by which image it was made of.

An image stands in a prompt as hashes of more bits than the tiers keep of a token, so
that such prompts stay out of them, and are computed where the device has lost them.
"""

import base64
import io

import numpy as np
import pytest
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import pinned, settle
from tests.scenarios.image_model import IMAGE, make_image_model
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    forget,
    same,
    start_plain,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

TEXT = "what is in this picture, and what in the one before it? " * 12
SIDE = 140
"""Pixels; 25 tokens."""


def picture(seed):
    """Return a picture of noise, as the data of a request."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def ask(server, tier):
    """Ask the same of two pictures, with their pages on one tier."""
    answers = []
    for seed in (1, 2, 1):
        forget(server, tier)
        request = body([], text=IMAGE + TEXT, image_data=picture(seed))
        del request["input_ids"]
        answers.append(server.post("/generate", request))
    return answers


def test_pictures(servers, tmp_path):
    """The same text behind another picture is no hit, and every answer is plain's; the
    tiers below the device keep nothing, so that another picture's KV cannot come up."""
    model = tmp_path / "model"
    model.mkdir()
    make_image_model(model)
    flags = ("--enable-multimodal", "--sleep-on-idle")
    spec = plain_spec(Device(model, PLAIN_POOL, PAGE, flags), "plain-images")
    server = start_plain(servers, spec)
    wants = [ask(server, tier) for tier in ("device", "host", "disk")]
    tiers = Tiers(16 * MB, tmp_path / "disk", 64 * MB)
    always = ("--tiered-load-policy=always", "--tiered-disk-admission=all")
    device = Device(model, 2048, PAGE, flags)
    server = servers.restart(tiered_spec(device, tiers, "images", always))
    # SGLang's first request of itself has a page of text.
    server.flush_cache()
    for tier, want in zip(("device", "host", "disk"), wants, strict=True):
        answers = ask(server, tier)
        same([()] * len(answers), want, answers)
        if tier == "device":
            assert [cached(one) for one in answers] == [cached(one) for one in want]
            assert [bool(cached(one)) for one in answers] == [False, False, True]
        else:
            assert [cached(one) for one in answers] == [{}] * len(answers)
        used = settle(server)["occupancy"].values()
        assert {each["used"] for each in used} == {0}
    # The pictures differ in the answers too, or the wrong one's pages would do.
    tops = [answer["meta_info"]["output_top_logprobs"][0] for answer in wants[0][:2]]
    assert abs(tops[0][0][0] - tops[1][0][0]) > 0.2 or tops[0][0][1] != tops[1][0][1]
    assert pinned(settle(server)) == 0
    servers.stop()
