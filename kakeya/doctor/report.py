"""What the doctor says: lines with a level each, and the report that they make. Values only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kakeya.core.errors import PeerProtocol


class Severity(StrEnum):
    """How bad it is; a fault makes the command's exit status 1."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


_ORDER = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding.

    `command` is the one that mends it, "" exactly when all is well; `on` is the machine to type
    it on, "" = this one. `peer` is the node that was looked at, "" = this one.
    """

    level: Severity
    what: str
    detail: str
    command: str = ""
    on: str = ""
    peer: str = ""


def ok(what: str, detail: str, *, peer: str = "") -> Finding:
    """Say that all is well."""
    return Finding(level=Severity.OK, what=what, detail=detail, peer=peer)


def warning(what: str, detail: str, command: str, *, on: str = "", peer: str = "") -> Finding:
    """Say what works badly, or soon will."""
    return Finding(
        level=Severity.WARNING, what=what, detail=detail, command=command, on=on, peer=peer
    )


def fault(what: str, detail: str, command: str, *, on: str = "", peer: str = "") -> Finding:
    """Say what does not work."""
    return Finding(
        level=Severity.FAULT, what=what, detail=detail, command=command, on=on, peer=peer
    )


def shell(*words: str) -> str:
    """Write a command line; whatever a peer put into a word stays inside that word."""
    return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What one examination found; `node` is who looked, "" = nobody but the command itself."""

    node: str
    lines: tuple[Finding, ...]
    seconds: float

    @property
    def level(self) -> Severity:
        """The worst of its lines."""
        return max((line.level for line in self.lines), key=_ORDER.index, default=Severity.OK)

    def as_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
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
    """Read what `encode_report` wrote. Raises PeerProtocol for anything else."""
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
