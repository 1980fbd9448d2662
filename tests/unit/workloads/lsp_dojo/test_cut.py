"""Code is cut at the error line, and the error stands there as a comment."""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.lsp_dojo.base import Finding
from sgl_tiered_workloads.lsp_dojo.cut import (
    closest_names,
    code_lines,
    cut_at_error,
    errors_by_line,
    replace_name,
    wrong_name,
)

CODE = "import math\n\ndef area(r):\n    return math.pii * r\n\nprint(area(2))\n"
PII = Finding(3, 11, 19, "No attribute `pii`", "missing-attribute")


def test_the_code_before_the_line_stays_and_the_error_follows_as_comments() -> None:
    """Wrong line, error and offers are comments at the wrong line's indentation."""
    assert cut_at_error(CODE, [PII], ["pi"]) == (
        "import math\n\ndef area(r):\n"
        "    # wrong: return math.pii * r\n"
        "    # error: No attribute `pii` [missing-attribute]\n"
        "    # known names: pi\n"
    )


def test_an_error_past_the_end_keeps_all_code() -> None:
    """Unclosed brackets are reported at the end of the file, where no line is."""
    code = "print((1)"
    cut = cut_at_error(code, [Finding(1, 0, 0, "unclosed")], [], comment="//")
    assert cut == "print((1)\n// error: unclosed\n"


def test_a_line_is_cut_once_for_all_its_errors() -> None:
    """Two errors of a line make one prompt that names both."""
    other = Finding(3, 22, 23, "r is odd")
    later = Finding(5, 0, 5, "later")
    assert errors_by_line([later, PII, other]) == [(PII, other), (later,)]
    cut = cut_at_error(CODE, [PII, other], [])
    assert "No attribute" in cut
    assert "r is odd" in cut


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (PII, (16, "pii")),
        (Finding(3, 16, 19, "only the name is marked"), (16, "pii")),
        (Finding(5, 6, 13, "a call is marked"), None),
        (Finding(9, 0, 3, "no such line"), None),
    ],
)
def test_the_wrong_name_is_what_the_mark_ends_with(
    finding: Finding, expected: tuple[int, str] | None
) -> None:
    """Whether the checker marks the whole expression or the name alone."""
    assert wrong_name(CODE, finding) == expected


def test_only_the_first_errors_of_a_line_are_written_down() -> None:
    """A line that is no code has dozens, which the first ones cause."""
    many = [Finding(5, at, at + 1, f"no {at}") for at in range(5)]
    cut = cut_at_error(CODE, many, [])
    assert cut.count("# error:") == 2
    assert "# error: no 0\n# error: no 1\n" in cut


def test_an_offered_name_takes_the_wrong_ones_place() -> None:
    """The code ends with the repaired line; what followed is written anew."""
    fixed = replace_name(CODE, 3, 16, "pii", "pi")
    assert fixed == "import math\n\ndef area(r):\n    return math.pi * r\n"


def test_only_names_like_the_wrong_one_are_offered() -> None:
    """Best first; none where the name is known, for then the error is another."""
    names = ["sqrt", "pi", "pow", "pi", "phi"]
    assert closest_names("pii", names, 5) == ("pi", "phi")
    assert closest_names("pii", names, 1) == ("pi",)
    assert closest_names("pow", names, 5) == ()
    assert closest_names("zzzz", names, 5) == ()


def test_lines_are_those_of_the_protocol() -> None:
    """A form feed, at which Python splits too, does not end a line."""
    source = "a\x0cb\r\nc\rd\u2028e\n\nf"
    assert code_lines(source) == ["a\x0cb\r\n", "c\r", "d\u2028e\n", "\n", "f"]
    assert "".join(code_lines(source)) == source
    cut = cut_at_error("x\x0c = 1\ny\n", [Finding(1, 0, 1, "wrong")], [])
    assert cut == "x\x0c = 1\n# wrong: y\n# error: wrong\n"
