"""Settings have the names, defaults, help and refusals of the snapshot beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from kakeya.config import config
from kakeya.core.errors import ConfigError
from tests.config.named import named

SNAPSHOT = Path(__file__).with_name("snapshot.json")
TEXTS = (
    *("", " ", "x", "-1", "0", "0.5", "1", "1.5", "7", "nan", "1e9", "512", "a:1", "a:0"),
    *("0.0.0.0:1", "::1:5", "127.0.0.1:0", "10.0.0.1/8", "10.0.0.0/8, x", "m=1", "m=0", "=1"),
    *("m=1,n=2,m=1", "json", "first_fit", "redis://h:1/0", "ngram", "kakeya-tiny:verifer"),
    *(":proposer", "true", "no", "a/b", "a" * 300, "~/x", '[{"system":"x"}]'),
    *('[{"sistem":"x"}]', "[1]", "{"),
)
TOMLS = (
    "true",
    "3",
    "-1",
    "0.5",
    "nan",
    '""',
    '"x"',
    '["x"]',
    "[1]",
    "[]",
    "{a=1}",
    '["a:1","a:1"]',
)
FLAG_TEXTS = ("", "x", "0", "7", "a:1", "nan")
ARGV = (
    ["--modle", "x"],
    ["extra"],
    ["--peer"],
    ["--no-mdns=1"],
    ["--tt", "3"],
    ["--http", "192.168.1.2:80"],
    ["--http", "0.0.0.0:80", "--insecure-lan"],
    ["--node-id", "a/b"],
    ["--node-id", "a" * 257],
    ["--model", "kakeya-tiny", "--proposer", "kakeya-tiny"],
    ["--model", "kakeya-tiny:proposer", "--proposer", "ngram"],
    ["--peer", "a:1", "--peer", "b:2"],
    ["--ttl", "20", "--exchange-interval", "10"],
    ["--config", "/nowhere/at/all.toml"],
    ["--config", "/"],
    ["--config"],
)
ENVIRONS: tuple[dict[str, str], ...] = (
    {"KAKEYA_PEER": "a:1", "KAKEYA_ZZZZZ": "1", "KAKEYA_PYTHON": "p", "KAKEYA_LEASE_ID": "x"},
    {"KAKEYA_PRECACHE_MEMORY_MB": "3", "KAKEYA_PAGES_PAGE_KB": "4096"},
    {"KAKEYA_MEMORY_STAY_WARM_S": "90", "KAKEYA_MEMORY_UNLOAD_AFTER_S": "80.5"},
    {"KAKEYA_PRECACHE_KEEP_ALIVE_S": "29.5", "KAKEYA_PRECACHE_SWEEP_S": "1"},
    {"XDG_DATA_HOME": "/data"},
)
FILES = (
    "[fleet]\npeer = []",
    "[fleat]\nttl = 30",
    "ttl = 30",
    "[fleet",
    "[fleet]\nttl = 30\nexchange_interval = 3\nfanout = 5\npeers = ['a:1']",
    "[[precache.prompts]]\nsystem = 'x'\n[[precache.prompts]]\nsistem = 'y'",
    "[precache.prompts]\nsystem = 'x'",
    "[node]\nname = 3",
)


def flat(made: config.NodeConfig) -> dict[str, str]:
    values = asdict(made) | {"warnings": made.warnings, "models": made.models}
    del values["chosen"]
    values["fleet"]["mdns"] = not values["fleet"].pop("no_mdns")
    found = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{key}": repr(one).replace(str(Path.home()), "~") for key, one in inner}
    return found


def outcome(argv: list[str], environ: dict[str, str]) -> object:
    try:
        made = flat(config.load(argv, {"HOME": "/home/x"} | environ))
    except ConfigError as refused:
        return refused.message
    except OSError as problem:  # a model whose name is longer than a path may be
        return repr(problem)
    usual = flat(config.load([], {"HOME": "/home/x"}))
    return {name: value for name, value in made.items() if usual[name] != value}


def collect(folder: Path) -> dict[str, object]:
    seen: dict[str, object] = {"names": named(), "usual": flat(config.load([], {}))}
    seen["help"] = subprocess.run(
        [sys.executable, "-m", "kakeya.node.daemon", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "100", "PATH": "/usr/bin:/bin"},
    ).stdout
    file = folder / "node.toml"

    def in_file(text: str) -> object:
        file.write_text(text)
        said = outcome(["--config", str(file)], {})
        return said.replace(str(folder), "") if isinstance(said, str) else said

    for argv in ARGV:
        seen[f"argv {argv}"] = outcome(argv, {})
    for environ in ENVIRONS:
        seen[f"environ {environ}"] = outcome([], environ)
    for text in FILES:
        seen[f"file {text}"] = in_file(text)
    for key, (variable, flag, *_rest) in named().items():
        section, _, name = key.partition(".")
        for value in TEXTS:
            seen[f"{variable}={value}"] = outcome([], {variable: value})
        for value in TOMLS:
            seen[f"{key}={value}"] = in_file(f"[{section}]\n{name} = {value}")
        for value in FLAG_TEXTS if flag else ():
            seen[f"{flag} {value}"] = outcome([flag, value], {})
        if flag:
            seen[flag] = outcome([flag], {})
    return seen


def test_nothing_differs_from_the_snapshot(tmp_path: Path) -> None:
    before, after = json.loads(SNAPSHOT.read_text()), json.loads(json.dumps(collect(tmp_path)))
    assert set(before) == set(after)
    for name, was in before.items():
        assert after[name] == was, name


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        SNAPSHOT.write_text(json.dumps(collect(Path(made)), indent=0, ensure_ascii=False))
