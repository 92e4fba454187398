"""The answers to canaries that were found right: a file for each set of weights, in the node's data
directory.

A file is written whole, with a checksum. One that does not read back is no answer, and the next
answer replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kakeya.backends.ring.canary import ANSWER_TOKENS, Answer, Numerics, SaidToken
from kakeya.core.files import write_atomically
from kakeya.core.log import event

_log = logging.getLogger(__name__)
FOLDER = "canaries"
_VERSION = 1
_MOST_ANSWERS = 8
"""Of one set of weights: the newest ones stay."""
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """An answer, the numerics that computed it, the length of its prompt, and what gave it."""

    numerics: Numerics
    prompt_tokens: int
    said_by: str
    answer: Answer


class AnswerFiles:
    """See the module. All methods block."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER

    def of(self, weights: str) -> tuple[KnownAnswer, ...]:
        """All answers of weights, by their digest, the newest first; () = none, or damaged ones."""
        path = self._path(weights)
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too long")  # noqa: TRY301
            return decode(path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as problem:
            what = "answers to the canary of ring groups cannot be read, and are left out"
            event(_log, what, level=logging.WARNING, file=path, problem=problem)
            return ()

    def add(self, weights: str, known: KnownAnswer) -> None:
        """Keep an answer, in place of one of the same numerics. A full disk is told in the log."""
        others = [one for one in self.of(weights) if one.numerics != known.numerics]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._path(weights), encode([known, *others][:_MOST_ANSWERS]))
        except OSError as problem:
            what = "an answer to the canary of a ring group was not kept"
            event(_log, what, level=logging.WARNING, problem=problem)

    def _path(self, weights: str) -> Path:
        name = hashlib.sha256(weights.encode()).hexdigest()
        return self._folder / f"{name}.json"


def encode(known: Sequence[KnownAnswer]) -> bytes:
    """Write answers with the checksum of their content."""
    content = json.dumps(
        [
            {
                "numerics": asdict(one.numerics),
                "prompt_tokens": one.prompt_tokens,
                "said_by": one.said_by,
                "answer": [[said.token, said.logprob, said.top] for said in one.answer],
            }
            for one in known
        ]
    )
    digest = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"version": _VERSION, "sha256": digest, "answers": content}).encode()


def decode(data: bytes) -> tuple[KnownAnswer, ...]:
    """Read what `encode` wrote. Raises ValueError for anything else."""
    try:
        outer = json.loads(data)
        content = outer["answers"]
        is_whole = hashlib.sha256(content.encode()).hexdigest() == outer["sha256"]
        if outer["version"] != _VERSION or not is_whole:
            raise ValueError("the checksum differs, or it is of another version")
        found = tuple(
            KnownAnswer(
                numerics=Numerics(**one["numerics"]),
                prompt_tokens=int(one["prompt_tokens"]),
                said_by=str(one["said_by"]),
                answer=tuple(
                    SaidToken(
                        token=int(token),
                        logprob=float(logprob),
                        top=tuple((int(other), float(its)) for other, its in top),
                    )
                    for token, logprob, top in one["answer"]
                ),
            )
            for one in json.loads(content)
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"it holds no answers: {problem!r}") from problem
    return tuple(one for one in found if len(one.answer) == ANSWER_TOKENS)
