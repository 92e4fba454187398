"""The cost of grammars over random JSON schemas, on the model of real size where it is there.

For each of 500 schemas a random answer is followed, and each of its masks made and put on logits.
Some are also answered by the model, with and without drafts of the tokens that the grammar forces;
the tokens are compared. Told: the share of masks in the time of decoding, and of forced tokens.

    .venv/bin/python -m benchmarks.grammars
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from llguidance import LLMatcher  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.models import EMBEDDED, NAMED, REAL  # noqa: E402
from benchmarks.plain import known_costs, known_model  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.decoding.processors.edits import LogitEdit, allowed_tokens  # noqa: E402
from kakeya.decoding.processors.grammar import GRAMMAR, Grammars  # noqa: E402
from kakeya.engine.kv.slots import KvSlots  # noqa: E402
from kakeya.engine.steps.drafting import RemoteBooks  # noqa: E402
from kakeya.engine.steps.sequence import SequenceRun, SequenceTools, Violations  # noqa: E402
from kakeya.generation.frames import Done, Tokens, Usage  # noqa: E402
from kakeya.generation.request import DecodeJob, DraftSource  # noqa: E402
from kakeya.mlx.model import MlxModel  # noqa: E402
from kakeya.mlx.selection import edited  # noqa: E402

FOLDER = Path(NAMED) if NAMED else REAL if REAL.is_dir() else EMBEDDED
SCHEMAS, ANSWERED = 500, 12
MOST_TOKENS = 24
FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PROMPT = "Tell about a city, its people and its weather, as JSON:\n"
WORDS = ("name", "city", "unit", "is_open", "count", "temperature", "tags", "reason", "kind")


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """As tools of agents have them: objects with strings, numbers, enums, arrays and choices."""
    kind = "leaf" if depth == 0 else rng.choice(("object", "array", "anyOf"))
    if depth == 3:
        kind = "object"
    if kind == "object":
        names = rng.sample(WORDS, rng.randint(1, 5))
        return {
            "type": "object",
            "properties": {name: schema(rng, rng.randint(0, depth - 1)) for name in names},
            "required": names[: rng.randint(1, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth - 1), "maxItems": rng.randint(1, 5)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth - 1), {"type": "null"}]}
    return rng.choice(
        (
            {"type": "string"},
            {"type": "string", "maxLength": 20},
            {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
            {"type": "integer", "minimum": 0, "maximum": 1000},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": rng.sample(WORDS, rng.randint(2, 6))},
        )
    )


def main() -> None:
    model = known_model(str(FOLDER))
    facts = model.facts
    text = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tools = SequenceTools(
        slots=KvSlots(0),
        controller=known_costs(model),
        books=RemoteBooks(),
        violations=Violations(),
        max_draft_rows=16,
    )
    grammars = Grammars(
        FOLDER / "tokenizer.json",
        vocab_size=facts.vocab_size,
        end_ids=facts.eos_token_ids,
        model_id=FOLDER.name,
    )
    rng = random.Random(24)
    asked = [
        LLMatcher.grammar_from_json_schema(schema(rng), overrides=FIXED) for _ in range(SCHEMAS)
    ]
    mask_s, made_s = masks(grammars, asked, facts.vocab_size, rng)
    job = DecodeJob(token_ids=text.encode(PROMPT).ids, max_tokens=MOST_TOKENS)
    plain_s, drafted_s, free_s, counts = [], [], [], [0, 0, 0]
    for grammar in asked[:ANSWERED]:
        followed = replace(job, grammar=grammar)
        tokens, seconds, _ = decoded(model, tools, grammars, followed)
        with_drafts = replace(followed, draft_sources=(DraftSource(kind="ngram"),))
        again, drafted, forced = decoded(model, tools, grammars, with_drafts)
        if again != tokens:
            raise SystemExit(f"other tokens with drafts: {again}, {tokens}, for {grammar}")
        free = decoded(model, tools, grammars, replace(job, max_tokens=len(tokens)))
        plain_s.append(seconds / len(tokens))
        drafted_s.append(drafted / len(tokens))
        free_s.append(free[1] / len(tokens))
        counts = [counts[0] + len(tokens), counts[1] + forced[0], counts[2] + forced[1]]
    token_s = median(plain_s)
    mean_s = float(np.mean(mask_s))
    emit(
        f"milliseconds of a token of {FOLDER.name} under a grammar",
        ours=1000 * token_s,
        baseline=1000 * mean_s,
        ratio=mean_s / token_s,
        goal="masks take at most 0.04 of decoding (ratio)",
        met=mean_s <= 0.04 * token_s,
        mask_us={q: round(1e6 * float(np.quantile(mask_s, q)), 1) for q in (0.5, 0.9, 0.99, 1.0)},
        masks=len(mask_s),
        compile_ms={q: round(1e3 * float(np.quantile(made_s, q)), 2) for q in (0.5, 0.99, 1.0)},
        free_ms=round(1000 * median(free_s), 2),
        drafted_ms=round(1000 * median(drafted_s), 2),
        tokens=counts[0],
        drafted_by_grammar=counts[1],
        accepted=counts[2],
    )


def masks(
    grammars: Grammars, asked: list[str], vocab_size: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Seconds of each mask, made and put on logits, along random answers; and of each matcher."""
    logits = mx.random.normal((1, vocab_size))
    mx.eval(logits, edited(logits, [LogitEdit()]))
    grammars.matcher(asked[0])  # builds the tokenizer
    mask_s, made_s = [], []
    for grammar in asked:
        began = time.perf_counter()
        matcher = grammars.matcher(grammar)
        made_s.append(time.perf_counter() - began)
        for _ in range(MOST_TOKENS):
            began = time.perf_counter()
            mask = matcher.masks()[0]
            mx.eval(edited(logits, [LogitEdit(allowed=mask)]))
            mask_s.append(time.perf_counter() - began)
            if mask is None:
                break
            matcher.extend([rng.choice(np.flatnonzero(allowed_tokens(mask, vocab_size)).tolist())])
            if matcher.is_over:
                break
    return mask_s, made_s


def decoded(
    model: MlxModel, tools: SequenceTools, grammars: Grammars, job: DecodeJob
) -> tuple[list[int], float, tuple[int, int]]:
    """The tokens, the seconds of decoding, and how many the grammar drafted, and were accepted."""
    grammar = grammars.matcher(job.grammar) if job.grammar else None
    tokens: list[int] = []
    usage = Usage()
    for frame in SequenceRun(model, tools, job, grammar).frames():
        if isinstance(frame, Tokens):
            tokens += frame.token_ids
        elif isinstance(frame, Done):
            usage = frame.usage
    forced = [source for source in usage.sources if source.source == GRAMMAR]
    counts = (forced[0].drafted, forced[0].accepted) if forced else (0, 0)
    return tokens, usage.total_s - usage.prefill_s, counts


if __name__ == "__main__":
    main()
