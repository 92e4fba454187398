"""Flags, environment and file: precedence, values, and refusals that say what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kakeya.adapters.tiers import TierRules
from kakeya.config.config import SETTINGS, load
from kakeya.core.errors import ConfigError
from kakeya.core.settings import is_loopback, split_address
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT
from kakeya.generation.spec import ModelRole
from kakeya.memory.pages.content import Fit, PageConfig

LIST = Path(__file__).parents[2] / "docs" / "settings.md"


def test_without_anything_the_embedded_model_and_ngram_run_on_loopback() -> None:
    config = load([], {})
    assert config.listen.bind == ""  # loopback, until there is an identity
    assert config.listen.http == "127.0.0.1:8210"
    assert [(spec.model_id, spec.role) for spec in config.models] == [
        ("kakeya-tiny", ModelRole.VERIFIER),
        ("ngram", ModelRole.PROPOSER),
    ]
    assert (config.fleet.ttl_s, config.fleet.interval_s, config.fleet.fanout) == (
        120,
        10,
        DEFAULT_FANOUT,
    )
    assert not config.warnings


def test_a_flag_beats_the_environment_and_that_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[fleet]\nttl = 30\nexchange_interval = 3\nfanout = 5\npeers = ["a:1"]\n')
    argv = ["--config", str(file), "--ttl", "50"]
    fleet = load(argv, {"KAKEYA_TTL": "40", "KAKEYA_EXCHANGE_INTERVAL": "4"}).fleet
    assert fleet.ttl_s == 50
    assert fleet.interval_s == 4
    assert fleet.fanout == 5
    assert fleet.peers == ("a:1",)


def test_repeated_flags_and_comma_variables_become_tuples() -> None:
    assert load(["--peer", "a:1", "--peer", "b:2"], {}).fleet.peers == ("a:1", "b:2")
    assert load([], {"KAKEYA_PEER": "a:1, b:2"}).fleet.peers == ("a:1", "b:2")


def test_a_named_proposer_alone_serves_no_verifier() -> None:
    config = load(["--proposer", "ngram", "--proposer", "kakeya-tiny-draft"], {})
    assert [(spec.model_id, spec.role) for spec in config.models] == [
        ("ngram", ModelRole.PROPOSER),
        ("kakeya-tiny-draft", ModelRole.PROPOSER),
    ]


def test_every_setting_has_its_own_flag_variable_and_key() -> None:
    for field in ("flag", "variable", "key"):
        names = [
            getattr(setting, field) for setting in SETTINGS.values() if getattr(setting, field)
        ]
        assert len(set(names)) == len(names)
    assert all(setting.variable and setting.key for setting in SETTINGS.values())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bind", "127.0.0.1"], ["--bind", "HOST:PORT"]),
        (["--bind", "127.0.0.1:70000"], ["--bind", "70000", "65535"]),
        (["--http", "127.0.0.1:http"], ["--http", "'http'"]),
        (["--http-cert", "c.pem"], ["--http-cert", "--http-cert-key"]),
        (["--http-keys", "none"], ["--http-keys", "remote", "always"]),
        (["--peer", "mini-2"], ["--peer", "mini-2"]),
        (["--peer", "mini-2:0"], ["--peer", "port 0"]),
        (["--peer", "0.0.0.0:50051"], ["--peer", "every address"]),
        (["--peer", "::1:50051"], ["--peer", "[::1]"]),
        (["--ttl", "5"], ["--ttl", "10", "600"]),
        (["--ttl", "nan"], ["--ttl", "10"]),
        (["--ttl", "soon"], ["--ttl", "soon"]),
        (["--exchange-interval", "0"], ["--exchange-interval", "0"]),
        (["--exchange-interval", "-1"], ["--exchange-interval", "-1"]),
        (["--fanout", "1.5"], ["--fanout", "1.5", "whole"]),
        (["--fanout", "0"], ["--fanout", "1"]),
        (["--log-format", "xml"], ["--log-format", "xml", "json"]),
        (["--modle", "x"], ["--modle", "--model"]),
        (["--peer"], ["--peer"]),
        (["extra"], ["extra"]),
        (["--node-id", "a" * 257], ["node id", "256"]),
        (["--node-id", "a\nb"], ["node id"]),
        (["--model", "kakeya-tiny:verifer"], ["verifer", "verifier"]),
        (["--model", "ngram"], ["--proposer ngram"]),
        (["--model", "kakeya-tiny", "--proposer", "kakeya-tiny"], ["kakeya-tiny", "twice"]),
        (["--config", "/nowhere/at/all.toml"], ["/nowhere/at/all.toml"]),
    ],
)
def test_a_wrong_flag_is_one_sentence_with_the_value(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(argv, {})
    for word in words:
        assert word in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[fleet]\npeer = []", ["fleet.peer", "fleet.peers"]),
        ("[fleat]\nttl = 30", ["fleat.ttl", "fleet.ttl"]),
        ("ttl = 30", ["ttl", "fleet.ttl"]),
        ("[fleet]\nttl = true", ["fleet.ttl", "True"]),
        ("[fleet]\npeers = 'a:1'", ["fleet.peers", "list"]),
        ("[fleet]\npeers = [1]", ["fleet.peers", "1"]),
        ("[listen]\ninsecure_lan = 3", ["listen.insecure_lan", "true or false"]),
        ("[models]\nserve = ['a:b']", ["models.serve", "'b'"]),
        ("[fleet", ["not a TOML file"]),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_file_and_key(
    tmp_path: Path, toml: str, words: list[str]
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as refused:
        load([], {"KAKEYA_CONFIG": str(file)})
    for word in [str(file), *words]:
        assert word in refused.value.message


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="KAKEYA_FANOUT: 'many'"):
        load([], {"KAKEYA_FANOUT": "many"})


def test_risky_and_unknown_values_are_warned_about() -> None:
    warnings = load(["--ttl", "20", "--exchange-interval", "10"], {"KAKEYA_PER": "a:1"}).warnings
    assert any("3 exchange intervals" in warning for warning in warnings)
    assert any("KAKEYA_PER " in text and "KAKEYA_PEER" in text for text in warnings)


def test_insecure_lan_opens_other_addresses() -> None:
    config = load(["--insecure-lan", "--bind", "0.0.0.0:0", "--http", "[::]:0"], {})
    assert config.listen.insecure_lan
    assert any("--insecure-lan" in warning for warning in config.warnings)
    assert split_address(config.listen.http) == ("::", 0)


@pytest.mark.parametrize("page_kb", [512, 1024, 2048, 4096])
def test_pages_have_one_of_four_sizes(page_kb: int, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'[pages]\npage_kb = {page_kb}\nfit = "first_fit"\n')
    adapters = load(["--config", str(file)], {}).adapters
    assert (adapters.page_bytes, adapters.fit) == (page_kb << 10, Fit.FIRST)
    assert load([], {"KAKEYA_PAGES_PAGE_KB": str(page_kb)}).adapters.page_bytes == page_kb << 10
    assert (load([], {}).adapters.page_bytes, load([], {}).adapters.fit) == (512 << 10, Fit.BEST)


def test_what_brings_adapters_nearer_to_their_engine_can_be_set(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        "[adapters]\nwindow_s = 600\nhot_uses = 3\nwarm_places = 0\n[pages]\nheadroom = 0.5\n"
        "high_watermark = 0.8\nlow_watermark = 0.6\n"
    )
    usual, given = load([], {}).adapters, load(["--config", str(file)], {}).adapters
    assert usual.rules == TierRules()
    assert usual.headroom == PageConfig().headroom
    assert given.rules == TierRules(window_s=600.0, hot_uses=3, warm_places=0)
    assert given.headroom == 0.5
    assert (usual.high_watermark, usual.low_watermark) == (0.9, 0.8)
    assert (given.high_watermark, given.low_watermark) == (0.8, 0.6)


@pytest.mark.parametrize(
    ("variable", "wrong"),
    [
        ("KAKEYA_ADAPTERS_WINDOW_S", "0"),
        ("KAKEYA_ADAPTERS_HOT_USES", "0"),
        ("KAKEYA_ADAPTERS_WARM_PLACES", "-1"),
        ("KAKEYA_PAGES_HEADROOM", "1.5"),
    ],
)
def test_what_cannot_be_is_refused(variable: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: {wrong} is out of range"):
        load([], {variable: wrong})


@pytest.mark.parametrize("wrong", ["3000", "0", "-512", "2 MB", '"2MB"', "true", "2048.5", "[512]"])
def test_another_page_size_is_refused_with_those_there_are(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"[pages]\npage_kb = {wrong}\n")
    says = r"TOML" if wrong == "2 MB" else r"pages.page_kb.*give 512, 1024, 2048 or 4096 KB"
    with pytest.raises(ConfigError, match=says):
        load(["--config", str(file)], {})
    with pytest.raises(ConfigError, match=r"KAKEYA_PAGES_PAGE_KB.*512, 1024, 2048 or 4096 KB"):
        load([], {"KAKEYA_PAGES_PAGE_KB": wrong})


def test_a_fit_that_is_none_and_less_room_than_one_page_are_refused() -> None:
    with pytest.raises(ConfigError, match="give best_fit or first_fit"):
        load([], {"KAKEYA_PAGES_FIT": "worst_fit"})
    small = {"KAKEYA_PRECACHE_MEMORY_MB": "3", "KAKEYA_PAGES_PAGE_KB": "4096"}
    with pytest.raises(ConfigError, match=r"less than one page of 4096 KB.*give 4 or more, or 0"):
        load([], small)
    for enough in ("4", "0"):
        load([], small | {"KAKEYA_PRECACHE_MEMORY_MB": enough})


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("192.168.0.1:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_only_loopback_counts_as_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("networks", ["10.0.0.0/33", "mini-1", "10.0.0.1/8", ""])
def test_a_range_that_is_none_is_refused(networks: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'[fleet]\nnetworks = ["{networks}"]\n')
    with pytest.raises(ConfigError, match=r"network|empty"):
        load(["--config", str(file)], {})


def test_a_label_is_printable_and_short() -> None:
    assert load(["--label", "Küche"], {}).label == "Küche"
    for wrong in ("a\tb", "x" * 65, "  "):
        with pytest.raises(ConfigError, match="--label"):
            load(["--label", wrong], {})


def test_names_follow_from_the_field() -> None:
    for key, flag, variable in (
        ("fleet.peers", "--peer", "KAKEYA_PEER"),
        ("listen.insecure_lan", "--insecure-lan", "KAKEYA_INSECURE_LAN"),
        ("memory.reserve_mb", "", "KAKEYA_MEMORY_RESERVE_MB"),
    ):
        assert (SETTINGS[key].flag, SETTINGS[key].variable) == (flag, variable)


def test_each_name_in_the_help_is_a_variable_too() -> None:
    for one in SETTINGS.values():
        words = (one.flag.removeprefix("--") or one.key).replace("-", "_").replace(".", "_")
        assert one.variable == f"KAKEYA_{words.upper()}"
    spelled = [name for one in SETTINGS.values() for name in (one.variable, *one.earlier)]
    assert len(spelled) == len(set(spelled))


def test_spellings_of_earlier_versions_count_with_a_warning() -> None:
    found = load([], {"KAKEYA_PEERS": "a:1,b:2", "KAKEYA_LEASE_STORE": "redis://h/0"})
    assert (found.fleet.peers, found.memory.lease_store) == (("a:1", "b:2"), "redis://h/0")
    assert found.warnings == (
        "KAKEYA_PEERS is an earlier spelling of KAKEYA_PEER",
        "KAKEYA_LEASE_STORE is an earlier spelling of KAKEYA_LEASES_STORE",
    )
    both = load([], {"KAKEYA_PEERS": "a:1", "KAKEYA_PEER": "b:2"})
    assert both.fleet.peers == ("b:2",)
    assert load([], {"MODEL_BOSS_ALLOW_CLOUD_FALLBACK": "false"}).warnings == ()


def test_the_list_of_settings_has_all_keys() -> None:
    listed = re.findall(r"^\[(\w+)\] +# (.+)$", LIST.read_text(), re.MULTILINE)
    keys = {f"{section}.{name}" for section, names in listed for name in names.split(", ")}
    assert keys == set(SETTINGS)
