"""The place of a machine's leases: the node chooses it, and the command line finds it again.

    leases.db    the SQLite file of a data directory, unless
    leases.url   names another store, written by a node that was configured so (it may hold a
                 password, as the folder's other secrets do: only its owner reads it)

Settings are checked by programs that open no store, so a store is imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kakeya.core.errors import ConfigError
from kakeya.core.files import write_atomically

if TYPE_CHECKING:
    from kakeya.memory.leases.store import LeaseStore

VARIABLE, EARLIER = "KAKEYA_LEASES_STORE", "KAKEYA_LEASE_STORE"
URL_FILE = "leases.url"
_LEAST_BUSY_S = 1.0
"""The least wait for other processes, which change the book within milliseconds."""


def open_lease_store(folder: Path, url: str = "", *, wait_s: float = float("inf")) -> LeaseStore:
    """The store of a data directory: its SQLite file, or the store of a URL. Raises ConfigError.

    Of a wait of `wait_s` for a lease, half is for other processes that write to a file: once to
    ask, and once more to take that back.
    """
    if url:
        from kakeya.memory.leases.processes import system_table
        from kakeya.memory.leases.redis import RedisLeaseStore

        return RedisLeaseStore(url, machine=lambda: system_table().machine())
    from kakeya.memory.leases.sqlite import BUSY_S, FILE, SqliteLeaseStore

    return SqliteLeaseStore(folder / FILE, busy_s=min(BUSY_S, max(_LEAST_BUSY_S, wait_s / 2)))


def chosen_url(folder: Path, environ: Mapping[str, str]) -> str:
    """The store that the environment names, else that of the last node. Blocks."""
    if named := environ.get(VARIABLE) or environ.get(EARLIER):
        return named
    try:
        return (folder / URL_FILE).read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as problem:
        raise ConfigError(
            f"{folder / URL_FILE} cannot be read: {problem.strerror or problem}; it names the "
            f"lease store, as {VARIABLE} does"
        ) from problem


def remember_url(folder: Path, url: str) -> None:
    """Tell the command line the store of a node. Raises OSError. Blocks."""
    if url:
        write_atomically(folder / URL_FILE, url.encode())
    else:
        (folder / URL_FILE).unlink(missing_ok=True)


def lease_store_url(text: str) -> str:
    """Check a setting's value. Raises ValueError."""
    if not text:
        return text
    from kakeya.memory.leases.redis import SCHEMES

    if not text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise ValueError(f"{text!r} is no address of a lease store; redis://HOST:PORT/DB is one")
    return text
