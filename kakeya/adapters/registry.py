"""The adapters of a node, by the names that callers use, and the clients that may use each."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, insort
from collections.abc import Iterator

from kakeya.adapters.files.store import AdapterRecord
from kakeya.core.errors import Denied, InvalidArgument, NotFound

MAX_CLIENT_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NEIGHBOURS = 50


def check_name(name: str) -> None:
    """Raise InvalidArgument unless this may be the name of an adapter."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:80]!r} cannot be an adapter's name; give 1 to 64 letters, digits, '.', '_' "
            "and '-', a letter or digit first",
            param="name",
        )


def check_client(client: str) -> None:
    """Raise InvalidArgument unless this may be the name of a client."""
    if len(client) > MAX_CLIENT_CHARS or not client.isprintable():
        raise InvalidArgument(
            f"{client[:80]!r} is no client's name; give at most {MAX_CLIENT_CHARS} printable "
            "characters",
            param="client",
        )


class AdapterRegistry:
    """Records by model id. `client` is the name of the caller; "" = unknown."""

    def __init__(self) -> None:
        self._records: dict[str, AdapterRecord] = {}
        self._sorted: list[str] = []

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[AdapterRecord]:
        return (self._records[model_id] for model_id in self._sorted)

    def get(self, model_id: str) -> AdapterRecord | None:
        """The record of a name; None = there is none."""
        return self._records.get(model_id)

    def find(self, model_id: str, client: str) -> AdapterRecord:
        """Find an adapter for a client. Raises NotFound naming near ones, and Denied."""
        record = self._records.get(model_id)
        if record is None:
            near = self._near(model_id, client)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise NotFound(f"there is no adapter {model_id[:120]!r} here{hint}")
        if record.owner and record.owner != client:
            raise Denied(
                f"adapter {record.model_id} belongs to another client; the caller is "
                f"{client[:80]!r}: show its owner's certificate, or name the client"
            )
        return record

    def named(self, name: str) -> AdapterRecord:
        """Find BASE:NAME, or the only one called NAME. Raises NotFound, InvalidArgument."""
        if name in self._records:
            return self._records[name]
        found = [record for record in self if record.name == name]
        if not found:
            raise NotFound(f"there is no adapter {name[:120]!r}; `kakeya adapters list` shows all")
        if len(found) > 1:
            ids = ", ".join(record.model_id for record in found)
            raise InvalidArgument(f"several adapters are called {name}: {ids}; name one of them")
        return found[0]

    def usable(self, client: str) -> tuple[AdapterRecord, ...]:
        """The adapters that a client may use, by name."""
        return tuple(record for record in self if record.owner in ("", client))

    def put(self, record: AdapterRecord) -> None:
        """Take a record in, or replace the one of its name."""
        if record.model_id not in self._records:
            insort(self._sorted, record.model_id)
        self._records[record.model_id] = record

    def drop(self, model_id: str) -> None:
        """Forget a record; harmless when there is none."""
        if self._records.pop(model_id, None) is not None:
            del self._sorted[bisect_left(self._sorted, model_id)]

    def _near(self, model_id: str, client: str) -> list[str]:
        """The likeliest of the names around it: comparing with all takes too long."""
        at = bisect_left(self._sorted, model_id)
        around = self._sorted[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
        usable = [name for name in around if self._records[name].owner in ("", client)]
        return difflib.get_close_matches(model_id[:200], usable, n=3)
