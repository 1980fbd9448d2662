"""numba may be installed and refuse to be imported: then the reference runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import numpy as np

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
logging.getLogger().addHandler(handler)

from sgl_tiered_kernels import kv_codec, page_copy

print(page_copy.backend_name(), kv_codec.backend_name())
print(page_copy.prepare())
if kv_codec.backend_name() == "reference":
    kv_codec.prepare()
to, frm = np.zeros((4, 8), np.uint8), np.arange(32, dtype=np.uint8).reshape(4, 8)
page_copy.copy_rows(to, [3, 1], 2, frm, [0, 2], 1, 4, by_team=True)
print(to[[3, 1], 2:6].tolist() == frm[[0, 2], 1:5].tolist(), int(to.astype(int).sum()))
for record in records:
    print(record)
"""
SUM = 1 + 2 + 3 + 4 + 17 + 18 + 19 + 20


def run(*folders: str) -> list[str]:
    """Return the lines that the program prints, with folders ahead on its path."""
    path = ":".join([*folders, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def package(folder, text, **modules):
    """Make a package that is named numba; return its folder's parent."""
    home = folder / "numba"
    home.mkdir()
    (home / "__init__.py").write_text(text)
    for name, content in modules.items():
        (home / f"{name}.py").write_text(content)
    return str(folder)


def test_numba_that_refuses_this_numpy_is_as_none_but_for_a_line(tmp_path):
    """Both operations run the reference and name it; why is said once for both."""
    refusal = "Numba needs NumPy 2.2 or less. Got NumPy 2.3."
    folder = package(tmp_path, f"raise ImportError({refusal!r})")
    names, prepared, copied, *records = run(folder)
    assert (names, prepared) == ("reference reference", "reference")
    assert copied == f"True {SUM}"
    (record,) = records
    assert record.startswith("('WARNING'")
    assert "numba" in record
    assert refusal in record


@pytest.mark.parametrize("error", ["SystemError", "AttributeError", "RuntimeError"])
def test_numba_may_break_in_other_ways(tmp_path, error):
    """A module of it that was built for another version raises anything."""
    folder = package(tmp_path, "", core=f"raise {error}('initialization failed')")
    names, prepared, copied, *records = run(folder)
    assert (names, prepared) == ("reference reference", "reference")
    assert copied == f"True {SUM}"
    (record,) = records
    assert "initialization failed" in record


def test_where_numba_works_it_is_what_runs():
    """Nothing is logged; the names are numba's."""
    pytest.importorskip("numba")
    names, prepared, copied, *records = run()
    assert (names, prepared) == ("numba numba", "numba")
    assert copied == f"True {SUM}"
    assert records == []


def test_where_numba_is_not_installed_nothing_is_said(monkeypatch):
    """That is how it was chosen to be, and no fault."""
    from sgl_tiered_kernels import compiled

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = []
    monkeypatch.setattr(compiled.logger, "warning", lambda *args: said.append(args))
    compiled.load_compiled.cache_clear()
    try:
        assert compiled.load_compiled("sgl_tiered_kernels.page_copy.cpu") is None
    finally:
        compiled.load_compiled.cache_clear()
    assert said == []
