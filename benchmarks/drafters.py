"""How many drafted tokens the embedded verifier accepts, by drafter: what decides whether it pays.

The verifier continues held-out texts greedily; each drafter drafts blocks for the very same text,
as a speculative decoder would, so no figure depends on the machine but the milliseconds. The
block-diffusion drafter is asked with one pass and with more, with the verifier's hidden states and
from token ids alone.

    .venv/bin/python -m benchmarks.drafters
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.report import emit, median
from kakeya.mlx.library import mlx_verifier

VERIFIER = mlx_verifier("kakeya-tiny")

from tokenizers import Tokenizer  # noqa: E402

from kakeya.decoding.draft.acceptance import agreeing  # noqa: E402
from kakeya.decoding.draft.proposer import Draft  # noqa: E402
from kakeya.decoding.draft.states import HiddenStates  # noqa: E402
from kakeya.decoding.ngram.ngram import NGramProposer  # noqa: E402
from kakeya.generation.spec import EMBEDDED_FOLDER  # noqa: E402
from kakeya.mlx.diffusion.model import DiffusionModel  # noqa: E402
from kakeya.mlx.drafts import Drafter  # noqa: E402
from kakeya.mlx.loader import load  # noqa: E402
from kakeya.mlx.verifier import MlxVerifier  # noqa: E402
from scripts.tiny.corpus import library_documents  # noqa: E402

TEXTS, PROMPT, CONTINUED = 6, 96, 96
BLOCKS, STEPS = (4, 8), (1, 2, 4)
AR, DLM = "kakeya-tiny-draft", "kakeya-tiny-dlm"
Ask: TypeAlias = Callable[[list[int], int, HiddenStates], Draft]


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation, and the states of all of it but the last token."""

    tokens: list[int]
    states: HiddenStates


def texts() -> list[Text]:
    """Held-out texts of the standard library, continued by the verifier."""
    tokenizer = Tokenizer.from_file(VERIFIER.tokenizer_file)
    held_out = [doc.text for doc in library_documents() if doc.held_out and len(doc.text) > 4000]
    tapped = load(
        str(EMBEDDED_FOLDER / "kakeya-tiny"), "v", states_for=(DLM, EMBEDDED_FOLDER / DLM)
    )
    found = []
    for number in range(TEXTS):
        text = held_out[number % len(held_out)]
        begin = text.find("\n", 1000 + 600 * (number // len(held_out))) + 1
        tokens = tokenizer.encode(text[begin : begin + 16 * PROMPT]).ids[:PROMPT]
        for _ in range(CONTINUED):
            tokens += VERIFIER.verify(tokens, [])
        state = MlxVerifier(tapped)
        state.prefill(tokens[:-1])
        states = state.hidden_states(0, len(tokens))
        assert states is not None
        found.append(Text(tokens, states))
    return found


def drafters() -> dict[str, Ask]:
    """Each drafter by its name in the report."""
    ngram = NGramProposer()
    draft = Drafter(load(str(EMBEDDED_FOLDER / AR), AR), 256)

    def blocks(steps: int, *, reads: bool) -> Ask:
        model = DiffusionModel(str(EMBEDDED_FOLDER / DLM), DLM)
        return lambda prefix, size, states: model.draft(
            prefix, size, None, 0.0, steps, states.between(0, len(prefix) - 1) if reads else None
        )

    return {
        "ngram": lambda prefix, size, states: ngram.propose(prefix, size),
        AR: lambda prefix, size, states: draft.draft(prefix, size, None, 0.0),
        **{f"{DLM}, {n} steps, ids": blocks(n, reads=False) for n in STEPS},
        **{f"{DLM}, {n} steps, states": blocks(n, reads=True) for n in STEPS},
    }


@dataclass
class Score:
    """What became of the drafts of one size."""

    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    tokens: int = 0
    passes: int = 0
    draft_s: list[float] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Accepted tokens of drafted ones."""
        return self.accepted / max(1, self.drafted)

    def __str__(self) -> str:
        return (
            f"accepted {self.acceptance:.3f}, {self.tokens / self.forwards:.2f} tokens a forward, "
            f"{self.passes / self.forwards:.1f} passes, "
            f"{1000 * median(self.draft_s):.1f} ms a draft"
        )


def score(ask: Ask, text: Text, size: int, into: Score) -> None:
    """Draft along a text as a speculative decoder would."""
    at = PROMPT
    while at < len(text.tokens):
        began = time.perf_counter()
        draft = ask(text.tokens[:at], size, text.states)
        into.draft_s.append(time.perf_counter() - began)
        room = text.tokens[at:]
        right = min(agreeing(draft.tokens, room), len(room) - 1)
        into.drafted += min(len(draft.tokens), len(room))
        into.accepted += right
        into.passes += draft.forward_passes
        into.forwards += 1
        into.tokens += right + 1
        at += right + 1


def main() -> None:
    known = texts()
    step_s = []
    for text in known[:4]:
        began = time.perf_counter()
        VERIFIER.verify(text.tokens, [])
        VERIFIER.verify([*text.tokens, 5], [])
        step_s.append((time.perf_counter() - began) / 2)
    scores: dict[tuple[str, int], Score] = {}
    for name, ask in drafters().items():
        for size in BLOCKS:
            found = scores[name, size] = Score()
            for text in known:
                score(ask, text, size, found)
            print(f"{name:34} blocks of {size}: {found}", flush=True)
    for size in BLOCKS:
        for steps in STEPS:
            ours, ids = (
                scores[f"{DLM}, {steps} steps, {kind}", size] for kind in ("states", "ids")
            )
            emit(
                f"accepted of drafted tokens, blocks of {size}, {steps} steps: with hidden states",
                ours=ours.acceptance,
                baseline=ids.acceptance,
                ratio=ours.acceptance / max(1e-9, ids.acceptance),
                goal="above 1: more than from token ids alone",
                met=ours.acceptance > ids.acceptance,
                draft_model=round(scores[AR, size].acceptance, 3),
                step_ms=round(1000 * median(step_s), 2),
            )


if __name__ == "__main__":
    main()
