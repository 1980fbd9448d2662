"""Whatever a settings file holds: settings, or one sentence about what is wrong."""

import math

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.serving.options import OPTIONS

FUZZED = sorted(OPTIONS)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**64, -1, 0, math.nan, math.inf])
)
digits = st.sampled_from(["9" * 400, "1" + "0" * 5000, "0." + "3" * 400, "1e9", "٣"])
units = st.sampled_from(["", "B", "GB", "TiB", " GiB", "XB", "gb"])
texts = (
    st.text(max_size=20)
    | st.sampled_from(
        [str(word) for row in OPTIONS.values() for word in row.kind.choices]
    )
    | st.tuples(digits | st.from_regex("[0-9]{1,30}", fullmatch=True), units).map(
        "".join
    )
    | st.sampled_from(["\0", "auto", "disk:bandwidth=1e999", "host:latency=nan"])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=4,
)


def refusal(call):
    """Return why the call was refused; None where it was not."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def is_one_sentence(text):
    return text.endswith(".") and "\n" not in text


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@example({"host_size": "9" * 400})
@example({"host_size": 10**400})
@example({"log_interval": 10**400})
@given(
    st.dictionaries(
        # Folders that a text happens to name would be made.
        st.sampled_from([name for name in FUZZED if "path" not in name]),
        values,
        max_size=4,
    )
)
def test_settings_are_read_or_refused_in_a_sentence(given_values):
    """Numbers without end, other types and texts of any kind included."""
    every = dict.fromkeys(FUZZED) | given_values
    why = refusal(lambda: read_options(every))
    assert why is None or is_one_sentence(why)


@given(values)
def test_a_size_is_a_number_of_bytes_or_is_refused(value):
    """No size is larger than a file can be."""
    found = []
    why = refusal(lambda: found.append(parse_size("--size", value)))
    assert is_one_sentence(why) if why else 0 <= found[0] < 2**63


@pytest.mark.parametrize(
    "text",
    [
        b"host-size = " + b"9" * 5000,
        b"\xff\xfe = 1",
        b"a = " + b"[" * 100_000,
        b'host-size = "x\\u0000"',
        b'disk-path = "x\\u0000"',
        b'disk-path = ["x\\u0000"]',
        b"seed = 1e999",
        b"seed = 0x" + b"f" * 5000,
        b"disk-threads = 0x" + b"f" * 5000,
        b"= 3",
    ],
)
def test_a_file_is_read_or_refused_in_a_sentence(tmp_path, text):
    """Also one of digits without end, of other bytes, or nested without end."""
    file = tmp_path / "tiers.toml"
    file.write_bytes(text)
    why = refusal(lambda: read_options({"config": str(file)}))
    assert why
    assert is_one_sentence(why)
