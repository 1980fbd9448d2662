"""Whose directory it is: locks, modes, foreign files."""

import os
import stat
import subprocess
import sys

import pytest

from sgl_tiered.errors import ConfigError, TierUnavailableError
from sgl_tiered.tiers.disk_format import META_NAME
from tests.unit.tiers.disk_support import open_tier, recovered, store


def test_second_opener_is_refused(path):
    """A path in use is refused with one sentence that names the process."""
    tier = open_tier(path)
    with pytest.raises(
        TierUnavailableError, match=rf"in use by process {os.getpid()};"
    ):
        open_tier(path)
    tier.close()
    open_tier(path).close()


def test_opener_in_another_process_is_refused(path):
    """The lock holds between processes, and dies with its process."""
    code = (
        "import sys; from pathlib import Path;"
        "from tests.unit.tiers.disk_support import open_tier;"
        "tier = open_tier(Path(sys.argv[1])); print('open', flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"open\n"
    with pytest.raises(TierUnavailableError, match=f"in use by process {child.pid};"):
        open_tier(path)
    child.kill()
    child.communicate()
    open_tier(path).close()


def test_refused_opener_leaves_the_tier_alone(path):
    """Who is refused changes nothing, even with another fingerprint."""
    tier = open_tier(path)
    store(tier, [0], [1])
    with pytest.raises(TierUnavailableError):
        open_tier(path, fingerprint="model-b")
    assert recovered(tier) == {0: 1}
    tier.close()


def test_modes(path):
    """Only the owner may read what users said to the model."""
    tier = open_tier(path / "deep")
    store(tier, [0], [1])
    assert stat.S_IMODE((path / "deep").stat().st_mode) == 0o700
    files = list((path / "deep").iterdir())
    assert len(files) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    tier.close()


@pytest.mark.parametrize("name", ["notes.txt", "tiered-slab-1.kv", "tiered-lock2"])
def test_foreign_file_is_refused_and_kept(path, name):
    """A directory with a file that is not ours is refused as it is."""
    path.mkdir(mode=0o755)
    (path / name).write_text("precious")
    with pytest.raises(TierUnavailableError, match=f"holds '{name}'"):
        open_tier(path)
    assert (path / name).read_text() == "precious"
    assert [entry.name for entry in path.iterdir()] == [name]


def test_folders_of_ranks_are_named(path):
    """A folder of a server with more ranks is refused with what it is."""
    (path / "rank-0-of-2").mkdir(parents=True)
    (path / "rank-1-of-2").mkdir()
    with pytest.raises(TierUnavailableError, match="a server with --tp-size 2 keeps"):
        open_tier(path)
    assert len(list(path.iterdir())) == 2
    (path / "rank-0-of-2").rmdir()
    (path / "rank-1-of-2").rmdir()
    (path / "rank-0-of-2").write_text("a file of somebody's")
    with pytest.raises(TierUnavailableError, match="holds 'rank-0-of-2'"):
        open_tier(path)


def test_link_with_our_name_is_foreign(path, tmp_path):
    """A link named like a slab is not followed."""
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    path.mkdir()
    (path / "tiered-slab-000000.kv").symlink_to(target)
    with pytest.raises(TierUnavailableError, match="holds"):
        open_tier(path)
    assert target.read_text() == "precious"


def test_pipe_in_the_place_of_the_meta_file_is_foreign(path):
    """Nothing is read from it, which would wait for ever."""
    path.mkdir()
    os.mkfifo(path / META_NAME)
    with pytest.raises(TierUnavailableError, match=f"holds '{META_NAME}'"):
        open_tier(path)


def test_path_that_is_a_file_is_refused(path):
    """A file in the place of the directory is refused with one sentence."""
    path.write_text("x")
    with pytest.raises(TierUnavailableError, match="cannot use"):
        open_tier(path)


def test_wrong_sizes_are_refused(path):
    """Sizes that cannot work are refused before anything is made."""
    with pytest.raises(ConfigError, match="disk size"):
        open_tier(path, max_bytes=4096)
    with pytest.raises(ConfigError, match="disk slot size"):
        open_tier(path, slot_bytes=5000, page_bytes=5000)
    with pytest.raises(ConfigError, match="disk slot size"):
        open_tier(path, page_bytes=9000)
    with pytest.raises(ConfigError, match="disk threads"):
        open_tier(path, num_threads=0)
    assert not path.exists()


def test_vanished_directory_is_not_usable(path):
    """A tier whose files were removed says so and stays quiet."""
    tier = open_tier(path)
    store(tier, [0], [1])
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    tier.look()
    health = tier.health()
    assert not health.usable
    assert "vanished" in health.detail
    assert not store(tier, [8], [2]).ok.any()
    tier.close()
