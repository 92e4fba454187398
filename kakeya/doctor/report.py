"""Findings of the doctor, each with a level, and the report of an examination. Values only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kakeya.core.errors import PeerProtocol


class Severity(StrEnum):
    """The level of a finding; a fault makes the command's exit status 1."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


_ORDER = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding.

    `command` mends the fault, "" exactly when all is well; `on` is the machine where to type it,
    "" = this one. `peer` is the examined node, "" = this one.
    """

    level: Severity
    what: str
    detail: str
    command: str = ""
    on: str = ""
    peer: str = ""


def ok(what: str, detail: str, *, peer: str = "") -> Finding:
    """Make a finding that all is well."""
    return Finding(level=Severity.OK, what=what, detail=detail, peer=peer)


def warning(what: str, detail: str, command: str, *, on: str = "", peer: str = "") -> Finding:
    """Make a finding of a thing that works badly, or soon will."""
    return Finding(
        level=Severity.WARNING, what=what, detail=detail, command=command, on=on, peer=peer
    )


def fault(what: str, detail: str, command: str, *, on: str = "", peer: str = "") -> Finding:
    """Make a finding of a thing that does not work."""
    return Finding(
        level=Severity.FAULT, what=what, detail=detail, command=command, on=on, peer=peer
    )


def shell(*words: str) -> str:
    """Write a command line; the text of a peer stays one quoted word."""
    return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings of one examination by `node`; "" = the command examined without a node."""

    node: str
    lines: tuple[Finding, ...]
    seconds: float

    @property
    def level(self) -> Severity:
        """The worst level of all findings."""
        return max((line.level for line in self.lines), key=_ORDER.index, default=Severity.OK)

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON object."""
        return {
            "node": self.node,
            "level": self.level.value,
            "seconds": round(self.seconds, 2),
            "lines": [
                {
                    "level": line.level.value,
                    "what": line.what,
                    "detail": line.detail,
                    "command": line.command,
                    "on": line.on,
                    "peer": line.peer,
                }
                for line in self.lines
            ],
        }


def encode_report(report: Examination) -> str:
    """Write a report as JSON text."""
    return json.dumps(report.as_json())


def decode_report(text: str) -> Examination:
    """Read the text of `encode_report`. Raises PeerProtocol for any other text."""
    try:
        tree = json.loads(text)
        return Examination(
            node=str(tree["node"]), lines=_lines(tree["lines"]), seconds=float(tree["seconds"])
        )
    except (ValueError, KeyError, TypeError) as problem:
        raise PeerProtocol(
            f"the node's report cannot be read ({problem!r}); "
            "run the kakeya command of the node's version"
        ) from problem


def _lines(items: Sequence[Mapping[str, object]]) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            level=Severity(str(item["level"])),
            what=str(item["what"]),
            detail=str(item["detail"]),
            command=str(item["command"]),
            on=str(item["on"]),
            peer=str(item["peer"]),
        )
        for item in items
    )
