"""Groups of real processes say what one process says, and refuse what ranks cannot share.

Tensor splits sum in another order than one process, so bits may differ: greedy tokens are compared,
of models that are small enough for no tie.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kakeya.core.units import pack_ids
from kakeya.v1 import engine_pb2 as pb
from tests.mlx.random_models import QWEN3_MOE, write_model
from tests.mlx.ring.rig import LAUNCH, START_S, Served, alone, group, is_running, loses
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")

PROMPTS = [[5, 9, 13, 2, 7] * 30, [3, 8] * 50, [11, 12, 13] * 10]
"""The first ones are longer than a piece of a prompt."""
TOKENS = 16
SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return write_model(
        tmp_path_factory.mktemp("llama") / "model",
        "llama",
        changes={**heads, "num_hidden_layers": 4, "max_position_embeddings": 16384},
    )


@pytest.fixture(scope="module")
def one(llama: Path) -> Iterator[Served]:
    with alone(llama) as served:
        yield served


@pytest.fixture(scope="module")
def two(llama: Path) -> Iterator[Served]:
    with group(2, llama, "--ring", "tensor") as served:
        yield served.serves()


def test_it_says_what_one_process_says(one: Served, two: Served) -> None:
    for prompt in PROMPTS:
        assert two.decode(prompt, TOKENS) == one.decode(prompt, TOKENS)
    seeded = {"temperature": 0.8, "seed": 7, "top_p": 1.0}
    assert two.decode(PROMPTS[0], TOKENS, **seeded) == one.decode(PROMPTS[0], TOKENS, **seeded)


def test_requests_at_once_share_forwards_and_say_the_same(one: Served, two: Served) -> None:
    said = [one.decode(prompt, 3 * TOKENS) for prompt in PROMPTS]
    assert together(two, PROMPTS, 3 * TOKENS) == said
    assert two.stub.Stats(pb.StatsRequest()).batch_rows >= 2


def test_drafts_change_nothing(one: Served, two: Served) -> None:
    ngram = [pb.DraftSource(kind=pb.DraftSource.KIND_NGRAM)]
    prompt = PROMPTS[1]
    assert two.decode(prompt, TOKENS, draft_sources=ngram) == one.decode(prompt, TOKENS)


@pytest.mark.slow
def test_a_kept_prefix_is_used_again(one: Served, two: Served) -> None:
    first = two.decode(PROMPTS[0], TOKENS, kv_key="chat")
    longer = [*PROMPTS[0], *first, 3, 4, 5]
    frames = list(two.stub.Decode(_request(longer, kv_key="chat"), timeout=START_S))
    done = next(frame.done for frame in (*frames, *frames[-1].following) if frame.HasField("done"))
    assert done.cached_tokens >= len(PROMPTS[0])
    assert two.decode(longer, TOKENS) == one.decode(longer, TOKENS)


def test_a_cancelled_request_leaves_the_ranks_together(one: Served, two: Served) -> None:
    call = two.stub.Decode(_request(PROMPTS[0], tokens=300), timeout=START_S)
    next(call)
    call.cancel()
    assert two.decode(PROMPTS[1], TOKENS) == one.decode(PROMPTS[1], TOKENS)


def test_what_ranks_cannot_share_is_refused(two: Served) -> None:
    facts = two.stub.Describe(pb.DescribeRequest())
    assert (facts.kv_block_tokens, facts.adapter_slots) == (0, 0)  # no KV in pages, no adapters
    with pytest.raises(grpc.RpcError, match="drafts for no peer"):
        two.stub.Draft(pb.DraftRequest(token_ids_le32=_request(PROMPTS[0]).token_ids_le32, size=4))
    assert two.decode(PROMPTS[2], 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "architecture", "changes", "flags"),
    [
        (2, "qwen3", {"num_attention_heads": 8, "num_key_value_heads": 8}, ["tensor"]),
        (3, "llama", {**SMOL, "intermediate_size": 192}, ["tensor"]),
        (2, "qwen3", QWEN3_MOE, ["pipeline", "--layers", "1,3"]),
    ],
    ids=["qwen3 with 8 KV heads", "9 heads and 3 KV heads on 3 ranks", "unequal layers"],
)
def test_other_splits_say_what_one_process_says(
    tmp_path: Path, ranks: int, architecture: str, changes: dict[str, object], flags: Sequence[str]
) -> None:
    model = write_model(tmp_path / "model", architecture, changes=changes)
    with alone(model) as one, group(ranks, model, "--ring", *flags) as many:
        many.serves()
        assert len(many.pids()) == ranks
        said = [one.decode(prompt, TOKENS) for prompt in PROMPTS[1:]]
        assert many.decode(PROMPTS[1], TOKENS) == said[0]
        assert together(many, PROMPTS[1:], TOKENS) == said


def test_a_killed_rank_ends_the_group_behind_all_other_tests_of_it(two: Served) -> None:
    stream = two.stream(PROMPTS[1], 16000)
    next(stream)
    os.kill(two.pids()[1], signal.SIGKILL)
    loses(two, stream)
    wait_until("the end of all", lambda: not any(map(is_running, two.pids())))


@pytest.mark.slow  # test_share.py has the refusals in one process
@pytest.mark.parametrize(
    ("architecture", "changes", "flags", "reason"),
    [
        ("llama", SMOL, ["tensor"], "9 attention heads, which 2 ranks cannot share equally"),
        ("llama", {}, ["pipeline"], "mlx-lm has no pipeline of 'llama' models"),
        ("gemma3", {}, ["tensor"], "mlx-lm has no tensor split of 'gemma3_text' models"),
    ],
)
def test_a_split_that_the_model_has_not_is_refused_by_all_ranks(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, object],
    flags: Sequence[str],
    reason: str,
) -> None:
    model = write_model(tmp_path / "model", architecture, changes=changes)
    with group(2, model, "--ring", *flags) as refused:
        refused.process.wait(START_S)
        assert reason in refused.said()
        assert "exited with code 2" in refused.said()


def together(served: Served, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Answers to requests that are there at the same time."""
    with ThreadPoolExecutor(len(prompts)) as asking:
        return list(asking.map(lambda prompt: served.decode(prompt, tokens), prompts))


def _request(prompt: Sequence[int], tokens: int = TOKENS, **more: object) -> pb.DecodeRequest:
    return pb.DecodeRequest(token_ids_le32=pack_ids(prompt), max_tokens=tokens, **more)  # type: ignore[arg-type]
