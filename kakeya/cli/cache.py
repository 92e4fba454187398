"""`kakeya cache`: show, verify and wipe the KV that is stored on disk.

The commands read the files in the data directory, with or without a running node: files only ever
appear whole. A wipe asks a running node to remove its KV, since a node holds more than files; a
killed node left its pages in shared memory, and a wipe removes those too. Exit status: 0 done, 1
damage was found, a file cannot be read or removed, or the node does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.core.errors import StoreFailed
from kakeya.core.units import format_bytes
from kakeya.node.datadir import find_running, is_held

if TYPE_CHECKING:  # not needed for `kakeya status` to answer
    from kakeya.prefix.disk.files import BlockFolder, Contents, Damage, FoundFile

_WIPE_S = 60.0
"""The limit for a node to remove its files."""
_SHOWN = 10
"""The most files that are listed for a person; JSON has all of them."""
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """The blocks of one fingerprint on disk."""

    fingerprint: str
    model_id: str
    adapter: str
    tenant: str
    blocks: int
    tokens: int
    bytes: int
    idle_s: float  # since the last use of any of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """The result of a wipe: files, blocks in a node's memory, and slabs of a killed node."""

    files: int
    kept: tuple[str, ...]
    """Files that could not be removed, with the reason."""
    blocks: int = 0
    slabs: int = 0


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    text = "prefixes that are stored on disk"
    cache = commands.add_parser("cache", help=text, description=text, allow_abbrev=False)
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, said in (
        ("stats", "show how much is stored, for which models, and for how long"),
        ("verify", "read all files, and set damaged ones aside"),
        ("wipe", "remove all KV, also in the memory of the node; prompts are then computed again"),
    ):
        action = actions.add_parser(name, help=said, description=said, allow_abbrev=False)
        add_data_dir(action)
        action.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    if options.command != "cache":
        return None
    from kakeya.prefix.disk.files import BlockFolder
    from kakeya.prefix.disk.stats import DiskConfig
    from kakeya.prefix.disk.store import FOLDER

    data_dir = data_dir_of(options)
    folder = BlockFolder(
        data_dir / FOLDER, quarantine_bytes=DiskConfig(cap_bytes=1).quarantine_bytes
    )
    running = find_running(data_dir)
    try:
        match options.action:
            case "stats":
                return _stats(folder, running is not None, as_json=options.json)
            case "verify":
                return _verify(folder, as_json=options.json)
            case _:
                if running is None and is_held(data_dir):
                    raise StoreFailed(
                        f"the node in {data_dir} is starting or stopping; run this again when it "
                        "is ready, or gone"
                    )
                pid = running.pid if running else None
                return _wipe(folder, data_dir, pid, as_json=options.json)
    except OSError as problem:
        raise StoreFailed(
            f"what is stored in {folder.folder} cannot be read: {problem.strerror or problem}"
        ) from None


def _stats(folder: BlockFolder, is_running: bool, *, as_json: bool) -> int:
    now = time.time()
    contents = folder.scan(is_owner=False, sets_aside=False)
    models = models_of(contents, now)
    files, file_bytes = folder.quarantined()
    retentions = {file.retention: 0 for file in contents.files}
    for file in contents.files:
        retentions[file.retention] += 1
    facts = {
        "folder": str(folder.folder),
        "is_node_running": is_running,
        "blocks": len(contents.files),
        "bytes": sum(file.size_bytes for file in contents.files),
        "by_retention": {kind.label: retentions[kind] for kind in sorted(retentions)},
        "models": [asdict(model) for model in models],
        "damaged": len(contents.damage),
        "quarantined": files,
        "quarantined_bytes": file_bytes,
    }
    if as_json:
        print(json.dumps(facts))
        return 0
    total = format_bytes(sum(file.size_bytes for file in contents.files))
    print(f"{len(contents.files)} blocks, {total} in {folder.folder}")
    for model in models:
        beside = "".join(f" {name}" for name in (model.adapter, model.tenant) if name)
        print(
            f"  {model.model_id or '(unnamed)'}{beside}  {model.fingerprint[:12]}  "
            f"{model.blocks} blocks, {model.tokens} tokens, {format_bytes(model.bytes)}, "
            f"used {_ago(model.idle_s)}"
        )
    for kind in sorted(retentions):
        print(f"  {kind.label}: {retentions[kind]} blocks, kept {_span(kind.seconds)} unused")
    if contents.damage:
        print(f"  {len(contents.damage)} damaged; kakeya cache verify sets them aside")
    if files:
        print(f"  {files} set aside, {format_bytes(file_bytes)}")
    return 0


def _verify(folder: BlockFolder, *, as_json: bool) -> int:
    contents = folder.scan(is_owner=False)
    names = [(file.name, file.block.id) for file in contents.files]
    found = folder.verify(names, lambda: True)
    damage = (*contents.damage, *found.damage)
    if as_json:
        facts = {
            "folder": str(folder.folder),
            "blocks": found.blocks,
            "bytes": found.read_bytes,
            "unreadable": found.unreadable,
            "damage": [asdict(one) for one in damage],
        }
        print(json.dumps(facts))
    else:
        print(f"{found.blocks} blocks are whole, {format_bytes(found.read_bytes)} read")
        _show_damage(damage)
        if found.unreadable:
            print(f"{found.unreadable} cannot be read now", file=sys.stderr)
    return 1 if damage or found.unreadable else 0


def _wipe(folder: BlockFolder, data_dir: Path, pid: int | None, *, as_json: bool) -> int:
    done = _clear(folder, data_dir) if pid is None else _ask(folder, data_dir)
    if as_json:
        facts = {
            "folder": str(folder.folder),
            "removed": done.files,
            "kept": done.kept,
            "memory_blocks": done.blocks,
            "slabs": done.slabs,
            "node_pid": pid,
        }
        print(json.dumps(facts))
        return 1 if done.kept else 0
    print(f"removed {done.files} files from {folder.folder}")
    if pid is not None:
        print(f"the node with pid {pid} let go of {done.blocks} blocks in memory")
    if done.slabs:
        print(f"removed {done.slabs} slabs of pages that a killed node left in shared memory")
    if not done.kept:
        return 0
    print(f"{len(done.kept)} cannot be removed; KV is left in them:", file=sys.stderr)
    _show(done.kept, sys.stderr)
    return 1


def _clear(folder: BlockFolder, data_dir: Path) -> _Done:
    """Remove the files, and the pages of a killed node."""
    from kakeya.memory.pages.slabs import remove_leftovers
    from kakeya.node.pages import ARENA_FOLDER

    removal, arena = folder.wipe(), data_dir / ARENA_FOLDER
    done = _Done(files=removal.files, kept=removal.kept)
    try:
        return replace(done, slabs=len(remove_leftovers(arena)))
    except OSError as problem:
        why = f"shared memory that {arena} lists: {problem.strerror or problem}"
        return replace(done, kept=(*done.kept, why))


def _ask(folder: BlockFolder, data_dir: Path) -> _Done:
    """Make the running node wipe its blocks in memory and its files.

    Raises the errors of `ask_node`.
    """
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1 import precache_pb2 as pb
    from kakeya.v1.precache_pb2_grpc import PrecacheServiceStub

    wiped: pb.WipeResponse = ask_node(
        data_dir,
        PrecacheServiceStub,
        lambda stub: stub.Wipe(pb.WipeRequest(), timeout=_WIPE_S),
        timeout_s=_WIPE_S,
    )
    done = _Done(files=wiped.files, kept=tuple(wiped.kept), blocks=wiped.memory_blocks)
    if wiped.has_disk:
        return done
    # A node that keeps no KV on disk ignores the files of an earlier run that did.
    removal = folder.wipe()
    return replace(done, files=removal.files, kept=removal.kept)


def models_of(contents: Contents, now: float) -> list[ModelUse]:
    """Sum up the files by fingerprint, the largest first."""
    groups: dict[bytes, list[FoundFile]] = {}
    for file in contents.files:
        groups.setdefault(file.block.fingerprint, []).append(file)
    uses = [
        ModelUse(
            fingerprint=fingerprint.hex(),
            model_id=str(files[0].block.facts.get("model_id", "")),
            adapter=str(files[0].block.facts.get("adapter", ""))[:12],
            tenant=str(files[0].block.facts.get("tenant", "")),
            blocks=len(files),
            tokens=sum(file.block.tokens for file in files),
            bytes=sum(file.size_bytes for file in files),
            idle_s=max(0.0, now - max(file.used_at for file in files)),
        )
        for fingerprint, files in groups.items()
    ]
    return sorted(uses, key=lambda use: -use.bytes)


def _show_damage(damage: Sequence[Damage]) -> None:
    if not damage:
        return
    print(f"{len(damage)} were damaged and are set aside:")
    _show([f"{one.name}: {one.problem}" for one in damage], sys.stdout)


def _show(lines: Sequence[str], file: TextIO) -> None:
    for line in lines[:_SHOWN]:
        print(f"  {line}", file=file)
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN} more", file=file)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 1 else f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
