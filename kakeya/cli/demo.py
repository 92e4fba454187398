"""`kakeya demo`: two real nodes on this machine, and four ways to draft for the same generation.

One node decodes with `kakeya-tiny`; the other node drafts, with n-grams and with
`kakeya-tiny-draft`. Both are ordinary daemons that find each other by gossip. Every way must give
the tokens of plain decoding; the table compares their speed. Runs of all ways alternate, and the
table shows medians, because a busy machine changes its speed from second to second.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from kakeya.cli.child import NodeProcess
from kakeya.cli.show.display import DemoRow, demo_progress, show_demo
from kakeya.core.errors import DeadlineExceeded
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.sessions.client import Client, GenerateSummary

VERIFIER, DRAFTER = "kakeya-tiny", "kakeya-tiny-draft"
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 384, 192, 3
_LIMIT_S = 115.0
_GOSSIP_S = 0.5
"""Exchange interval of the two nodes: short, so that they find each other within a second."""
Report = Callable[[str, float], None]
"""Gets the current step, and the part of the whole that is done, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One generation."""

    tokens: tuple[int, ...]
    summary: GenerateSummary

    @property
    def tokens_per_second(self) -> float:
        """Speed after prefill."""
        return len(self.tokens) / max(1e-9, self.summary.total_s - self.summary.prefill_s)


def run_demo(*, as_json: bool) -> int:
    """Run the demo; print the table or one JSON object. Returns 1 if an output differs."""
    with demo_progress(quiet=as_json) as report:
        rows = asyncio.run(_within_limit(report))
    if as_json:
        identical = all(row.identical for row in rows)
        sys.stdout.write(
            json.dumps({"identical": identical, "rows": [asdict(row) for row in rows]}) + "\n"
        )
    else:
        show_demo(rows)
    return 0 if all(row.identical for row in rows) else 1


async def _within_limit(report: Report) -> list[DemoRow]:
    try:
        async with asyncio.timeout(_LIMIT_S):
            with tempfile.TemporaryDirectory(prefix="kakeya-demo-") as folder:
                return await _demo(Path(folder), report)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the demo took longer than {_LIMIT_S:g} s; is this machine very busy?"
        ) from None


async def _demo(folder: Path, report: Report) -> list[DemoRow]:
    async with AsyncExitStack() as stack:
        report("starting two nodes", 0.0)
        pace = ("--exchange-interval", str(_GOSSIP_S))
        verifier = NodeProcess(
            folder / "a", "--node-id", "demo-verifier", "--model", VERIFIER, *pace
        )
        await stack.enter_async_context(verifier)
        drafts = ("--proposer", "ngram", "--proposer", DRAFTER, "--peer", verifier.grpc)
        drafter = NodeProcess(folder / "b", "--node-id", "demo-drafter", *drafts, *pace)
        await stack.enter_async_context(drafter)
        report("waiting until the nodes have found each other", 0.05)
        await _until_planned(verifier, drafter)
        client = await stack.enter_async_context(Client(verifier.grpc))
        ways = {
            "plain greedy": "off",
            "local n-gram": "ngram",
            "remote n-gram": f"ngram@{drafter.grpc}",
            "remote draft model": f"{DRAFTER}@{drafter.grpc}",
        }
        return await _measure(client, ways, texts(), report)


async def _until_planned(verifier: NodeProcess, drafter: NodeProcess) -> None:
    """Wait until the verifier's node would ask the drafter's model."""
    wanted = f"{DRAFTER}@{drafter.grpc}"
    while True:
        fleet = await asyncio.to_thread(verifier.api.get, "/api/v1/fleet")
        if wanted in json.dumps(fleet.get("plan")):
            return
        await asyncio.sleep(0.1)


async def _measure(
    client: Client, ways: Mapping[str, str], prompts: Mapping[str, Sequence[int]], report: Report
) -> list[DemoRow]:
    runs: dict[tuple[str, str], list[DemoRun]] = {}
    total = (ROUNDS + 1) * len(prompts) * len(ways)
    done = 0
    for round_number in range(ROUNDS + 1):  # the first round warms up and is not counted
        for text, prompt in prompts.items():
            for way, policy in ways.items():
                report(f"{text}: {way}", 0.1 + 0.9 * done / total)
                run = await _generate(client, prompt, policy)
                done += 1
                if round_number:
                    runs.setdefault((text, way), []).append(run)
    plain = next(iter(ways))
    return [_row(text, way, runs[text, way], runs[text, plain]) for text in prompts for way in ways]


async def _generate(client: Client, prompt: Sequence[int], policy: str) -> DemoRun:
    async with await client.create_session(model_id=VERIFIER, label="demo") as session:
        await session.append(prompt)
        tokens = [token async for token in session.generate(NEW_TOKENS, draft_policy=policy)]
        assert session.last_done is not None
        return DemoRun(tokens=tuple(tokens), summary=session.last_done)


def _row(text: str, way: str, runs: Sequence[DemoRun], plain: Sequence[DemoRun]) -> DemoRow:
    speed = statistics.median(run.tokens_per_second for run in runs)
    verified = sum(run.summary.verified_tokens for run in runs)
    accepted = sum(run.summary.accepted_tokens for run in runs)
    steps = sum(run.summary.forwards for run in runs)
    return DemoRow(
        text=text,
        way=way,
        tokens_per_second=round(speed, 1),
        speedup=round(speed / statistics.median(run.tokens_per_second for run in plain), 2),
        drafted=sum(run.summary.drafted_tokens for run in runs),
        verified=verified,
        accepted=accepted,
        acceptance=round(accepted / verified, 3) if verified else None,
        shadowed=sum(run.summary.shadowed_tokens for run in runs),
        shadow_hits=sum(run.summary.shadow_hit_tokens for run in runs),
        tokens_per_step=round(sum(len(run.tokens) for run in runs) / max(1, steps), 2),
        identical=all(run.tokens == plain[0].tokens for run in runs),
    )


def texts() -> dict[str, list[int]]:
    """Take prompts from Python's library: code, which repeats itself, and prose, which does not."""
    import http
    import pydoc_data.topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED_FOLDER / VERIFIER / "tokenizer.json"))
    sources = {
        "code": Path(http.__file__).read_text("utf-8"),
        "prose": pydoc_data.topics.topics["objects"],
    }
    return {
        name: tokenizer.encode(source, add_special_tokens=False).ids[:PROMPT_TOKENS]
        for name, source in sources.items()
    }


if __name__ == "__main__":
    sys.exit(run_demo(as_json="--json" in sys.argv))
