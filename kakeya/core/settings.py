"""One setting: a field of a config class, the names that it has outside, and its legal values.

    capacity: int = setting("meaning", whole(1, 100_000, "sessions"), 256)

Every refusal is one sentence that names the origin, the value and what would be right.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from kakeya.core.hosts import is_loopback_host
from kakeya.core.units import MIB

Value = TypeVar("Value")
Word = TypeVar("Word", bound=str)
METADATA = "kakeya"
MAX_LABEL_BYTES = 64


class Illegal(ValueError):
    """A value is not legal; the message follows "ORIGIN: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[Value]):
    """The metadata of a field that can be set.

    `parse` gets text from a flag or a variable and a TOML value from the file; it raises Illegal
    with the sentence after "ORIGIN: ". `argument` is how help writes the flag's value: "" = the
    flag takes none, None = there is no flag.
    """

    meaning: str
    parse: Callable[[object], Value]
    default: Value
    argument: str | None = None
    key: str = ""
    flag: str = ""
    variable: str = ""
    earlier: tuple[str, ...] = ()
    """Variables that had its value in earlier versions: they still count, with a warning."""

    @property
    def repeats(self) -> bool:
        """Whether the flag is given once per value, and the variable holds a list with commas."""
        return isinstance(self.parse, Several)

    def named(self, section: str, field_name: str) -> Setting[Value]:
        """Fill in the names that the field does not give itself.

        key       SECTION.FIELD; a field in bytes is set in MB: warm_bytes is adapters.warm_mb
        flag      --FIELD as in the key, singular where it repeats: fleet.peers is --peer
        variable  KAKEYA_ and the words of the flag; without a flag KAKEYA_ and those of the key
        """
        key = self.key or f"{section}.{re.sub('_bytes$', '_mb', field_name)}"
        flag, plural = self.flag, "s" if self.repeats else ""
        if not flag and self.argument is not None:
            flag = "--" + key.partition(".")[2].removesuffix(plural).replace("_", "-")
        words = flag.removeprefix("--") if flag else key
        variable = "KAKEYA_" + re.sub("[-.]", "_", words).upper()
        earlier = (*self.earlier, *((variable + plural.upper(),) if flag and plural else ()))
        return replace(self, key=key, flag=flag, variable=variable, earlier=earlier)


def setting(
    meaning: str,
    parse: Callable[[object], Value],
    default: Value,
    *,
    argument: str | None = None,
    key: str = "",
    flag: str = "",
    earlier: tuple[str, ...] = (),
) -> Value:
    """Make a field of a config class that can be set; a key and a flag are given only against the
    rule, and `earlier` are variables of earlier versions."""
    said = Setting(
        meaning=meaning,
        parse=parse,
        default=default,
        argument=argument,
        key=key,
        flag=flag,
        earlier=earlier,
    )
    return field(default=default, metadata={METADATA: said})


def nearest(word: str, known: Iterable[str]) -> str:
    """Write `; did you mean X?` for the nearest known word, or "" when none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def text(raw: object) -> str:
    """Accept non-empty text."""
    if not isinstance(raw, str) or not raw.strip():
        raise Illegal(f"{raw!r} is not a text; give a non-empty one")
    return raw.strip()


def label(raw: object) -> str:
    """Accept a name of 1 to 64 bytes without control characters."""
    name = text(raw)
    if len(name.encode("utf-8", "replace")) > MAX_LABEL_BYTES or not name.isprintable():
        raise Illegal(f"{name[:80]!r} is not a name; give 1 to {MAX_LABEL_BYTES} printable bytes")
    return name


def network(raw: object) -> str:
    """Accept a range of addresses, as 10.0.0.0/8."""
    try:
        return str(ipaddress.ip_network(text(raw)))
    except ValueError as problem:
        raise Illegal(f"{raw!r} is not a network; write one as 10.0.0.0/8 ({problem})") from None


def folder(raw: object) -> Path:
    """Accept a path; `~` is the home folder."""
    return Path(text(raw)).expanduser()


def switch(raw: object) -> bool:
    """Accept true or false, in TOML or as a word."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise Illegal(f"{raw!r} is not a switch; give true or false")


def number(low: float, high: float, unit: str) -> Callable[[object], float]:
    """Accept a finite number within low..high."""

    def parse(raw: object) -> float:
        wanted = f"give a number of {unit} from {low:g} to {high:g}"
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise Illegal(f"{raw!r} is not a number; {wanted}")
        try:
            value = float(raw)
        except ValueError:
            raise Illegal(f"{raw!r} is not a number; {wanted}") from None
        if not math.isfinite(value) or not low <= value <= high:
            raise Illegal(f"{raw} is out of range; {wanted}")
        return value

    return parse


def whole(low: int, high: int, unit: str) -> Callable[[object], int]:
    """Accept a whole number within low..high."""
    bounded = number(low, high, unit)

    def parse(raw: object) -> int:
        value = bounded(raw)
        if value != int(value):
            raise Illegal(f"{raw} is not whole; give a whole number of {unit}")
        return int(value)

    return parse


def megabytes(low: int, high: int) -> Callable[[object], int]:
    """Accept a whole number of MB within low..high; the result is in bytes."""
    parse = whole(low, high, "MB")
    return lambda raw: parse(raw) * MIB


def one_number_of(numbers: Sequence[int], unit: str) -> Callable[[object], int]:
    """Accept one of a few whole numbers."""
    listed = f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]} {unit}"

    def parse(raw: object) -> int:
        text = raw.strip() if isinstance(raw, str) else raw
        for one in numbers:
            if text in (one, str(one)) and not isinstance(text, bool):
                return one
        raise Illegal(f"{raw!r} is not one of the sizes; give {listed}")

    return parse


@dataclass(frozen=True, slots=True)
class Several(Generic[Value]):
    """Accept a list, each item by `parse`, without repetitions."""

    parse: Callable[[object], Value]

    def __call__(self, raw: object) -> tuple[Value, ...]:
        """Parse a list."""
        if not isinstance(raw, list):
            raise Illegal(f"{raw!r} is not a list; write it in brackets")
        return tuple(dict.fromkeys(self.parse(item) for item in raw))


def one_of(*words: Word) -> Callable[[object], Word]:
    """Accept one of a few words."""

    def parse(raw: object) -> Word:
        for word in words:
            if raw == word:
                return word
        raise Illegal(f"{raw!r} is not known; give {' or '.join(words)}")

    return parse


def none_if_zero(parse: Callable[[object], Value]) -> Callable[[object], Value | None]:
    """Read 0 as None."""
    return lambda raw: parse(raw) or None


def split_address(address: str) -> tuple[str, int]:
    """Take HOST:PORT apart; IPv6 hosts stand in brackets. Raises Illegal."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    wrong = f"{address!r} is not an address; write HOST:PORT, as 127.0.0.1:50051 or [::1]:50051"
    if not colon or not bare or (":" in bare) != bracketed or any(c.isspace() for c in address):
        raise Illegal(wrong)
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Illegal(f"port {port!r} of {address!r} is not a whole number from 0 to 65535")
    return bare, int(port)


def bind_address(raw: object) -> str:
    """Accept an address to listen on; port 0 lets the system choose."""
    address = text(raw)
    split_address(address)
    return address


def peer_address(raw: object) -> str:
    """Accept the address of another node."""
    address = text(raw)
    host, port = split_address(address)
    if port == 0:
        raise Illegal(f"{address!r} has port 0, where no node can listen")
    if host in ("0.0.0.0", "::"):
        raise Illegal(f"{address!r} means every address of a machine; name one of them")
    return address


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return is_loopback_host(split_address(address)[0])
