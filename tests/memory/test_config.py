"""The memory of a node as its owner sets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.config.config import load
from kakeya.core import errors
from kakeya.core.units import MIB


def test_memory_is_configured_by_file_variable_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        "[memory]\nbudget_mb = 500\nreserve_mb = 64\nstay_warm_s = 5\nunload_after_s = 60\n"
        'pinned = ["a"]\nsizes_mb = ["org/a=700", "b=1"]\n'
        '[leases]\nstore = "redis://127.0.0.1:6379/0"\n'
    )
    memory = load(["--config", str(file)], {}).memory
    assert memory.budget_bytes == 500 * MIB
    assert memory.reserve_bytes == 64 * MIB
    assert (memory.stay_warm_s, memory.unload_after_s, memory.pinned) == (5, 60, ("a",))
    assert memory.stated_bytes == (("org/a", 700 * MIB), ("b", MIB))
    assert memory.lease_store == "redis://127.0.0.1:6379/0"
    environ = {"KAKEYA_MEMORY_BUDGET_MB": "600"}
    assert load(["--config", str(file)], environ).memory.budget_bytes == 600 * MIB
    flags = ["--config", str(file), "--memory-budget", "700"]
    assert load(flags, environ).memory.budget_bytes == 700 * MIB
    plain = load([], {}).memory
    assert (plain.budget_bytes, plain.unload_after_s, plain.lease_store) == (None, None, "")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"KAKEYA_MEMORY_BUDGET_MB": "-1"}, "out of range"),
        ({"KAKEYA_MEMORY_UNLOAD_AFTER_S": "60"}, "less than memory.stay_warm_s, 300 s"),
        ({"KAKEYA_MEMORY_SIZES_MB": "kakeya-tiny"}, "give MODEL=MB"),
        ({"KAKEYA_MEMORY_SIZES_MB": "kakeya-tiny=big"}, "not a number"),
        ({"KAKEYA_LEASE_STORE": "http://x"}, "no address of a lease store"),
    ],
)
def test_memory_that_cannot_be_meant_is_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(errors.ConfigError, match=sentence):
        load([], environ)
