"""Settings of a tiered server: what is read, and what is refused in which words."""

import math
from types import SimpleNamespace

import pytest

from sgl_tiered.cache.config import DEMOTE_POLICIES, WRITE_POLICIES
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.serving import tier_sizes
from sgl_tiered.serving.option_reader import FAULT_ENV, read_options
from sgl_tiered.serving.options import OPTIONS, Queue
from sgl_tiered.serving.tier_sizes import rank_folder
from sgl_tiered.tiers.cxl_source import CxlSource

HOST = {"host_size": "1MB"}


def read(**values):
    return read_options(values)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5MB", 1_500_000),
        ("1 GiB", 2**30),
        (" 3gb ", 3 * 10**9),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_understood(text, num_bytes):
    """Whole numbers are bytes, and a text has a decimal or a binary unit."""
    assert parse_size("--s", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1XB", "1e9", "1,5GB", -3, True, 1.5j]
)
def test_what_is_no_size_is_refused(text):
    """A text that is not a size is refused by the name of its setting."""
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size("--tiered-x", text)
    assert caught.value.setting == "--tiered-x"


def test_defaults():
    """Without flags there is a host tier of some size, no disk, and LRU."""
    config = read()
    assert config.tiers.host_bytes > 0
    assert config.tiers.disk_paths == ()
    assert config.tiers.disk_io == "auto"
    assert config.tiers.disk_bytes == 0
    assert config.tiers.eviction_policy == "lru"
    assert config.writes.write_policy == "auto"
    assert config.writes.offload_threshold == 0.9
    assert config.writes.disk_admission == "auto"
    assert config.loads.load_policy == "auto"
    assert config.observe.explain_last == 1_000
    assert config.queue.order == "fcfs"
    assert config.queue.prefetch == "arrival"
    assert config.queue.prefetch_window == 16
    assert config.experiment.emulate == ()
    assert not config.experiment.switchable_faults


def test_file_stands_for_flags_and_flags_win(tmp_path):
    """Keys with dashes or underscores stand for flags; a given flag wins."""
    file = tmp_path / "tiers.toml"
    file.write_text('host-size = "1MB"\nlog_interval = 5\nload-policy = "never"\n')
    config = read(config=str(file), load_policy="always")
    assert config.tiers.host_bytes == 10**6
    assert config.observe.log_interval_s == 5.0
    assert config.loads.load_policy == "always"


def test_a_table_stands_for_its_keys(tmp_path):
    """By the group's name; keys outside of tables go on to stand for their flags."""
    file = tmp_path / "tiers.toml"
    file.write_text(
        'host-size = "1MB"\n[queue]\norder = "car"\nprefetch-window = 3\n'
        '[layerkv]\nlayerkv = "on"\nlayerkv-retain = 2\n'
    )
    options = read(config=str(file), order="fcfs")
    assert options.tiers.host_bytes == 10**6
    assert options.queue == Queue(
        order="fcfs", prefetch_window=3, length_predictor="online"
    )
    assert options.layerkv.retain == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[disks]\nseed = 1", "unknown key 'disks'"),
        ("[tiers]\nhost_sise = 1", "unknown key 'host_sise'"),
        ("seed = 1\n[experiment]\nseed = 2", "the key 'seed' twice"),
        ("pd-caching = 2", "unknown key 'pd_caching'"),
        ("host_sise = 1", "unknown key 'host_sise'"),
        ("host_size = ", "is not TOML"),
        ('config = "x.toml"', "unknown key 'config'"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, words):
    """A file with a wrong key or wrong syntax is refused with its path."""
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read(config=str(file))
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    """A file that is not there is refused, not ignored."""
    with pytest.raises(ConfigError, match="cannot be read"):
        read(config=str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"host_size": "0"}, "--tiered-host-size"),
        ({"host_size": "9000TB"}, "--tiered-host-size"),
        ({"host_size": "much"}, "--tiered-host-size"),
        ({"cxl_size": "1GB"}, "--tiered-cxl-size"),
        ({"cxl": "emulate:memory"}, "--tiered-cxl-size"),
        ({"cxl": "emulate:memory", "cxl_size": "0"}, "--tiered-cxl-size"),
        ({"cxl": "emulate:memory", "cxl_size": "big"}, "--tiered-cxl-size"),
        ({"cxl": "tape", "cxl_size": "1MB"}, "--tiered-cxl"),
        ({"cxl": "node:9999", "cxl_size": "1MB"}, "--tiered-cxl"),
        ({"cxl": "/dev/dax99.9"}, "--tiered-cxl"),
        ({"disk_size": "1GB"}, "--tiered-disk-size"),
        ({"staging_size": "0"}, "--tiered-staging-size"),
        ({"eviction_policy": "best"}, "--tiered-eviction-policy"),
        ({"write_policy": "no"}, "--tiered-write-policy"),
        ({"demote_policy": "no"}, "--tiered-demote-policy"),
        ({"disk_admission": "no"}, "--tiered-disk-admission"),
        ({"offload_threshold": 90}, "--tiered-offload-threshold"),
        ({"offload_threshold": -0.1}, "--tiered-offload-threshold"),
        ({"offload_threshold": math.nan}, "--tiered-offload-threshold"),
        ({"offload_threshold": True}, "--tiered-offload-threshold"),
        ({"load_policy": "no"}, "--tiered-load-policy"),
        ({"order": "lifo"}, "--tiered-order"),
        ({"prefetch": "soon"}, "--tiered-prefetch"),
        ({"prefetch_window": 0}, "--tiered-prefetch-window"),
        ({"prefetch_window": 16.0}, "--tiered-prefetch-window"),
        ({"disk_threads": 0}, "--tiered-disk-threads"),
        ({"disk_threads": True}, "--tiered-disk-threads"),
        ({"disk_io": "aio"}, "--tiered-disk-io"),
        ({"disk_path": " , "}, "--tiered-disk-path"),
        ({"seed": -1}, "--tiered-seed"),
        ({"explain_last": -1}, "--tiered-explain-last"),
        ({"explain_last": 2.5}, "--tiered-explain-last"),
        ({"log_interval": -0.5}, "--tiered-log-interval"),
        ({"log_interval": math.nan}, "--tiered-log-interval"),
        ({"emulate": "host"}, "--tiered-emulate"),
        ({"emulate": "tape:latency=1"}, "--tiered-emulate"),
        ({"emulate": "host:speed=1GB"}, "--tiered-emulate"),
        ({"emulate": "host:latency=soon"}, "--tiered-emulate"),
        ({"emulate": "host:latency=-1"}, "--tiered-emulate"),
        ({"emulate": "host:latency=nan"}, "--tiered-emulate"),
        ({"emulate": "disk:bandwidth=0"}, "--tiered-emulate"),
        ({"emulate": "disk:bandwidth=fast"}, "--tiered-emulate"),
        ({"fault_corrupt": "zero"}, "--tiered-fault-corrupt"),
    ],
)
def test_bad_values_name_their_flag(monkeypatch, values, setting):
    """A value that cannot work is refused with the flag's name and a remedy."""
    monkeypatch.delenv(FAULT_ENV, raising=False)
    with pytest.raises(ConfigError) as caught:
        read(**{**HOST, **values})
    assert caught.value.setting == setting
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_cxl_tier_is_read():
    """A place and a size; without the flag there is none."""
    config = read(**HOST, cxl="emulate:memory", cxl_size="3MB")
    assert config.tiers.cxl == CxlSource(emulated=True)
    assert config.tiers.cxl_bytes == 3 * 10**6
    assert read(**HOST).tiers.cxl is None


def test_host_and_cxl_share_the_machines_memory(monkeypatch):
    """What the CXL tier takes is not offered to the host tier a second time."""
    monkeypatch.setattr(tier_sizes, "available_memory_bytes", lambda: 10**9)
    cxl = {"cxl": "emulate:memory", "cxl_size": "600MB"}
    assert read(**cxl).tiers.host_bytes == 200 * 10**6
    assert read(**cxl, host_size="400MB").tiers.host_bytes == 400 * 10**6
    with pytest.raises(ConfigError, match="beside the CXL tier") as caught:
        read(**cxl, host_size="401MB")
    assert caught.value.setting == "--tiered-host-size"


def test_more_than_a_real_source_has_is_refused(monkeypatch):
    """auto takes all of it, and a larger size is refused with what there is."""
    monkeypatch.setattr(tier_sizes, "largest_bytes", lambda source: 10**6)
    monkeypatch.setattr(
        tier_sizes, "parse_source", lambda text, size: CxlSource(nodes=(5,))
    )
    assert read(**HOST, cxl="node:5").tiers.cxl_bytes == 10**6
    assert read(**HOST, cxl="node:5", cxl_size="auto").tiers.cxl_bytes == 10**6
    with pytest.raises(ConfigError, match="CXL is NUMA node 5") as caught:
        read(**HOST, cxl="node:5", cxl_size="2MB")
    assert caught.value.setting == "--tiered-cxl-size"


FREE = 100 * 10**9


@pytest.fixture
def machine(monkeypatch):
    """A machine with ``FREE`` bytes of memory and ten times as much disk."""
    monkeypatch.setattr(tier_sizes, "available_memory_bytes", lambda: FREE)
    usage = SimpleNamespace(free=10 * FREE)
    monkeypatch.setattr(tier_sizes.shutil, "disk_usage", lambda folder: usage)
    return usage


def on_ranks(num_ranks, *, is_first=True, **values):
    return read_options(values, num_ranks=num_ranks, is_first=is_first)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_share_what_is_free(machine, tmp_path, num_ranks):
    """All ranks together take half of memory and disk, as one rank would."""
    config = on_ranks(num_ranks, disk_path=str(tmp_path))
    at_most = min(FREE // 2, 64 * 2**30 * num_ranks)
    assert config.tiers.host_bytes * num_ranks == pytest.approx(at_most, rel=1e-6)
    assert config.tiers.disk_bytes * num_ranks == pytest.approx(5 * FREE, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_restart_keeps_what_the_ranks_hold(machine, tmp_path, num_ranks):
    """What lies in the ranks' folders is free for them: the sizes are as before."""
    before = on_ranks(num_ranks, disk_path=str(tmp_path)).tiers.disk_bytes
    for rank in range(num_ranks):
        mine = rank_folder(tmp_path, rank, num_ranks)
        mine.mkdir(exist_ok=True)
        with (mine / "tiered-slab-000000.kv").open("wb") as slab:
            slab.truncate(before)
    machine.free -= before * num_ranks
    again = on_ranks(num_ranks, disk_path=str(tmp_path)).tiers.disk_bytes
    assert again == pytest.approx(before, rel=1e-6)
    # What other ranks hold, this number of ranks does not give back.
    other = on_ranks(num_ranks + 1, disk_path=str(tmp_path)).tiers.disk_bytes
    assert other * (num_ranks + 1) == pytest.approx(machine.free / 2, rel=1e-6)


def test_a_size_counts_once_for_each_rank(machine):
    """Two ranks of 60 GB do not fit; a rank beside another one looks at its own."""
    assert on_ranks(2, host_size="50GB").tiers.host_bytes == 50 * 10**9
    with pytest.raises(ConfigError, match="for each of 2 ranks") as caught:
        on_ranks(2, host_size="60GB")
    assert caught.value.setting == "--tiered-host-size"
    assert on_ranks(2, is_first=False, host_size="60GB").tiers.host_bytes == 60 * 10**9


def test_ranks_share_a_cxl_source(machine, monkeypatch):
    """auto is a rank's part of it, and all parts are taken off free memory."""
    monkeypatch.setattr(tier_sizes, "largest_bytes", lambda source: 40 * 10**9)
    monkeypatch.setattr(
        tier_sizes, "parse_source", lambda text, size: CxlSource(nodes=(5,))
    )
    assert on_ranks(4, cxl="node:5").tiers.cxl_bytes == 10**10
    emulated = CxlSource(emulated=True)
    monkeypatch.setattr(tier_sizes, "parse_source", lambda text, size: emulated)
    config = on_ranks(4, cxl="emulate:memory", cxl_size="10GB")
    assert config.tiers.host_bytes == (FREE - 4 * 10**10) // 8


def test_a_disk_folder_is_made(tmp_path):
    """A folder that is not there yet is made; auto takes half of the free space."""
    folder = tmp_path / "a" / "b"
    config = read(**HOST, disk_path=str(folder))
    assert config.tiers.disk_paths == (folder,)
    assert folder.is_dir()
    assert config.tiers.disk_bytes > 0
    config = read(**HOST, disk_path=str(folder), disk_size="3MB")
    assert config.tiers.disk_bytes == 3 * 10**6


def test_several_disk_folders(tmp_path):
    """Commas separate folders, and all are made; a file may have a list."""
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    folders = (tmp_path / "a", tmp_path / "b")
    assert read(**HOST, disk_path=", ".join(names)).tiers.disk_paths == folders
    assert all(folder.is_dir() for folder in folders)
    file = tmp_path / "tiers.toml"
    file.write_text(f"host-size = '1MB'\ndisk-path = {names}\ndisk-io = 'mmap'\n")
    config = read(config=str(file))
    assert config.tiers.disk_paths == folders
    assert config.tiers.disk_io == "mmap"


def test_folders_of_one_disk_share_what_is_free(tmp_path):
    """Half of the free space is taken once, however many folders lie there."""
    one = read(**HOST, disk_path=str(tmp_path / "a")).tiers.disk_bytes
    two = read(**HOST, disk_path=f"{tmp_path}/b,{tmp_path}/c").tiers.disk_bytes
    assert two == pytest.approx(one, rel=0.1)


def test_a_folder_twice_is_refused(tmp_path):
    """The second would find the first's lock."""
    with pytest.raises(ConfigError, match="twice"):
        read(**HOST, disk_path=f"{tmp_path},{tmp_path}/../{tmp_path.name}/.,{tmp_path}")


@pytest.mark.parametrize("size", ["0", "none"])
def test_a_disk_of_no_size_is_refused(tmp_path, size):
    """A disk tier has a size."""
    with pytest.raises(ConfigError) as caught:
        read(**HOST, disk_path=str(tmp_path), disk_size=size)
    assert caught.value.setting == "--tiered-disk-size"


def test_a_disk_path_that_is_a_file_is_refused(tmp_path):
    """A path at which there is a file cannot be a tier's folder."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError) as caught:
        read(**HOST, disk_path=str(file))
    assert caught.value.setting == "--tiered-disk-path"


def test_emulations_are_understood():
    """The flag's text becomes sections; what it may say is tested with its parser."""
    first, second = read(
        **HOST, emulate="host:bandwidth=2GB; disk:latency=0.25"
    ).experiment.emulate
    assert first.tiers == (TierId.HOST,)
    assert first.bandwidth_bytes_per_s == 2e9
    assert second.tiers == (TierId.DISK,)
    assert second.latency_s == 0.25


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"fault_corrupt": "zero"}, "zero"),
        ({"fault_corrupt": "swap"}, "swap"),
        ({"emulate": "host:fault=error@0.5"}, "error"),
    ],
)
def test_faults_need_the_environment(monkeypatch, flags, kind):
    """Failures and wrong answers are to be had only by who asks for them twice."""
    monkeypatch.setenv(FAULT_ENV, "1")
    config = read(**HOST, **flags)
    assert [
        fault.kind for one in config.experiment.emulate for fault in one.faults
    ] == [kind]
    assert config.experiment.switchable_faults
    monkeypatch.setenv(FAULT_ENV, "yes")
    with pytest.raises(ConfigError, match=FAULT_ENV):
        read(**HOST, **flags)


def test_paths_are_expanded(tmp_path, monkeypatch):
    """A tilde stands for the user's home, and a relative path becomes absolute."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(**HOST, disk_path="~/kv").tiers.disk_paths == (tmp_path / "kv",)
    monkeypatch.chdir(tmp_path)
    assert read(**HOST, disk_path="kv").tiers.disk_paths == (tmp_path / "kv",)


@pytest.mark.parametrize("name", ["calibration", "disk_path", "sparsity_profile"])
def test_a_home_that_is_not_there_is_refused(name):
    """In a sentence, as any other path that is none."""
    given = {"sparsity": "load", name: "~nobody-of-this-name/kv"}
    with pytest.raises(ConfigError, match="home") as caught:
        read(**HOST, **given)
    assert caught.value.setting == OPTIONS[name].flag


def test_a_server_of_a_pool_copies_what_others_may_ask_for():
    """All pages, unless another policy is given; auto cannot be."""
    pool = {**HOST, "pool": "local"}
    assert read_options(pool).writes.write_policy == "write-through"
    assert (
        read_options({**pool, "write_policy": "selective"}).writes.write_policy
        == "selective"
    )
    with pytest.raises(ConfigError, match="--tiered-pool") as caught:
        read_options({**pool, "write_policy": "auto"})
    assert caught.value.setting == "--tiered-write-policy"


def test_choices_are_the_policies_that_there_are():
    """The flags offer what the registries have, and nothing else."""
    for name, choices in {
        "disk_admission": WRITE_ADMISSIONS,
        "eviction_policy": EVICTION_POLICIES,
        "write_policy": WRITE_POLICIES,
        "demote_policy": DEMOTE_POLICIES,
        "order": ORDERS,
    }.items():
        assert OPTIONS[name].kind.choices == choices


def test_a_threshold_is_a_share():
    """From 0, always ahead of need, to 1, never."""
    assert read(**HOST, offload_threshold=1).writes.offload_threshold == 1.0
    assert read(**HOST, offload_threshold=0.75).writes.offload_threshold == 0.75


def test_a_length_predictor_is_checked_when_the_server_starts() -> None:
    """None by default; a known name stays, a wrong one is one sentence on its flag."""
    assert read(**HOST).queue.length_predictor == "none"
    for name in ("none", "online", "oracle", "llm", "constant:256"):
        assert read(**HOST, length_predictor=name).queue.length_predictor == name
    for name in ("onlin", "constant", "constant:0"):
        with pytest.raises(ConfigError, match="--tiered-length-predictor"):
            read(**HOST, length_predictor=name)


def test_targets_are_seconds() -> None:
    """Both, one or none, with an admission; and a predictor comes with it."""
    config = read_options({**HOST, "admission": "slo", "slo_ttft": 2, "slo_tpot": 0.05})
    assert (config.slo.admission, config.slo.slo_ttft_s, config.slo.slo_tpot_s) == (
        "slo",
        2.0,
        0.05,
    )
    assert config.queue.length_predictor == "online"
    assert read_options({**HOST, "admission": "slo"}).slo.slo_tpot_s == 0.0
    plain = read_options(HOST)
    assert (plain.slo.admission, plain.queue.length_predictor) == ("none", "none")


def test_the_floor_of_targets_follows_the_servers() -> None:
    """A quarter of the server's own; half a second where it has none."""
    told = {**HOST, "admission": "slo"}
    assert read_options(told).slo.slo_floor_s == 0.5
    assert read_options({**told, "slo_ttft": 8}).slo.slo_floor_s == 2.0
    assert read_options({**told, "slo_ttft": 8, "slo_floor": 3}).slo.slo_floor_s == 3.0
    with pytest.raises(ConfigError, match="--tiered-slo-floor: 9 is more than"):
        read_options({**told, "slo_ttft": 8, "slo_floor": 9})
    with pytest.raises(ConfigError, match="--tiered-slo-floor: has no effect"):
        read_options({**HOST, "slo_floor": 9})


def test_layer_wise_kv_reads_tpot_targets_and_lengths() -> None:
    """Without an admission too; nobody would read a TTFT target."""
    told = {**HOST, "layerkv": "on"}
    config = read_options({**told, "slo_tpot": 0.05})
    assert (config.slo.slo_tpot_s, config.queue.length_predictor) == (0.05, "online")
    assert (
        read_options({**told, "length_predictor": "none"}).queue.length_predictor
        == "none"
    )
    with pytest.raises(ConfigError, match="--tiered-slo-ttft: has no effect"):
        read_options({**told, "slo_ttft": 2.0})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"slo_ttft": 2.0}, "--tiered-slo-ttft: has no effect without an admission"),
        ({"admission": "slo", "slo_tpot": 0}, "--tiered-slo-tpot: is 0"),
        ({"admission": "slo", "slo_tpot": "fast"}, "is not a time"),
        ({"admission": "slo", "slo_ttft": math.nan}, "is not a time"),
        ({"admission": "always"}, "use none, slo"),
        ({"admission": "slo", "length_predictor": "none"}, "needs one"),
    ],
)
def test_a_wrong_admission_is_refused(wrong: dict[str, object], words: str) -> None:
    """In one sentence that says what to do."""
    with pytest.raises(ConfigError, match=words):
        read_options({**HOST, **wrong})
