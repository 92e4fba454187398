"""`kakeya logs`: the log of the node here, from its file; or what a node of the fleet tells lately.

A node keeps the last lines of its log in memory, for the page; those of peers come through the node
that is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.node_api import KEY_VARIABLE, NodeApi, find_node
from kakeya.cli.show.labels import NodeLabels
from kakeya.core.errors import NotFound
from kakeya.core.settings import nearest
from kakeya.core.units import printable
from kakeya.node.datadir import find_running

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_TEXT = "show the log of the node here, or what a node of the fleet did in the last hour"
_LOOK_S = 0.5
_BLOCK = 65536
_PEERS_S = 5.0
"""How long peers may take to tell of themselves."""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    logs = commands.add_parser("logs", help=_TEXT, description=_TEXT, allow_abbrev=False)
    logs.add_argument("peer", nargs="?", default="", metavar="NODE", help="label of a node")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines")
    logs.add_argument("-n", "--lines", type=_count, default=100, metavar="N", help="default: 100")
    logs.add_argument("--node", default="", metavar="HOST:PORT", help="HTTP address of a node")
    add_data_dir(logs)


def _count(written: str) -> int:
    if not written.isdecimal():
        raise argparse.ArgumentTypeError(f"{written!r} is no count of lines; write 0 or more")
    return int(written)


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other. Raises KakeyaError."""
    if options.command != "logs":
        return None
    folder = data_dir_of(options)
    file = None if options.peer or options.node else _file_of(folder)
    if file is not None:
        if not os.access(file, os.R_OK):
            raise NotFound(f"the log {file} is gone, or you may not read it")
        lines: Iterable[str] = last_lines(file, options.lines)
        if options.follow:
            lines = follow(file, options.lines)
    else:
        node = find_node(options.node, folder, os.environ.get(KEY_VARIABLE, ""))
        lines = told_lines(node, options.peer, options.lines, is_followed=options.follow)
    for line in lines:
        print(printable(line), flush=True)
    return 0


def _file_of(folder: Path) -> Path | None:
    """The log file of the node of a folder, also after its end; None = it has none."""
    from kakeya.cli.service.start import LOG

    running = find_running(folder)
    if running is not None:
        return Path(running.log_file) if running.log_file else None
    places = (folder / LOG, *service_logs(folder))
    there = [place for place in places if place.is_file()]
    return max(there, key=lambda place: place.stat().st_mtime, default=None)


def service_logs(folder: Path) -> tuple[Path, ...]:
    """The files to which services of a data directory log."""
    from kakeya.cli.service.files import log_file

    return (log_file(folder, Path.home(), "darwin"), log_file(folder, Path.home(), "linux"))


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log file, and of the one before it where this one is short."""
    with file.open("rb") as log:
        return _last(log, file, count)


def _last(log: BinaryIO, file: Path, count: int) -> list[str]:
    """`last_lines` of an open file, which is left at the end of these lines."""
    before = file.with_name(file.name + ".1")
    lines = _tail(log, count)
    if len(lines) < count and before.is_file():
        with before.open("rb") as older:
            lines = [*_tail(older, count - len(lines)), *lines]
    return lines


def _tail(log: BinaryIO, count: int) -> list[str]:
    end = at = log.seek(0, os.SEEK_END)
    if count <= 0:
        return []
    text = b""
    while at > 0 and text.count(b"\n") <= count:
        step = min(_BLOCK, at)
        at -= step
        log.seek(at)
        text = log.read(step) + text
    log.seek(end)
    return text.decode("utf-8", "replace").splitlines()[-count:]


def follow(file: Path, count: int) -> Generator[str, None, None]:
    """The last lines of a log file and then each new one, also after the file was renamed."""
    log, rest = file.open("rb"), b""
    try:
        yield from _last(log, file, count)
        while True:
            is_renamed = _is_renamed(file, log.fileno())  # before the read of its last lines
            *lines, rest = (rest + log.read()).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if is_renamed:
                log.close()
                log = file.open("rb")
            elif not lines:
                time.sleep(_LOOK_S)
    finally:
        log.close()


def _is_renamed(file: Path, descriptor: int) -> bool:
    try:
        return file.stat().st_ino != os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def told_lines(node: NodeApi, peer: str, count: int, *, is_followed: bool) -> Iterator[str]:
    """What a node, or the peer of it with a label, tells that it did, in the order of time.

    Raises NotFound for an unknown label, and the errors of `NodeApi`.
    """
    shown_at, names = 0.0, NodeLabels()
    for facts in node.facts(None if is_followed else _PEERS_S):
        chosen, names = _chosen(facts, peer), _names(facts)
        if peer and not chosen and _chosen(facts, ""):  # the cards of peers come with the own one
            known = sorted(filter(None, names.by_id.values()))
            raise NotFound(f"no node is called {peer!r}{nearest(peer, known)}")
        news = facts.get(chosen, {}).get("events") or []
        lines = [one for one in reversed(news) if float(one["at"]) > shown_at]
        for one in lines[max(0, len(lines) - count) :] if shown_at == 0.0 else lines:
            yield names.within(_line(one))
        shown_at = max([shown_at, *(float(one["at"]) for one in lines)])
        if news and not is_followed:
            return


def _names(facts: Mapping[str, Mapping[str, Any]]) -> NodeLabels:
    found = {node_id: one.get("card") or one.get("node") or {} for node_id, one in facts.items()}
    return NodeLabels({node_id: str(one.get("label") or "") for node_id, one in found.items()})


def _chosen(facts: Mapping[str, Mapping[str, Any]], peer: str) -> str:
    for node_id, sections in facts.items():
        card = sections.get("card") or {}
        if peer in (card.get("label"), node_id) if peer else card.get("is_self"):
            return node_id
    return ""


def _field(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _line(one: Mapping[str, Any]) -> str:
    stamp = time.strftime("%H:%M:%S", time.localtime(float(one["at"])))
    fields = "".join(f" {key}={_field(value)}" for key, value in one["fields"].items())
    times = f" ({one['times']} times)" if one.get("times", 1) > 1 else ""
    return f"{stamp} {one['level']:<7} {one['room']}: {one['what']}{fields}{times}"
