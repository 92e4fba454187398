"""Where conversations may part: cuts stay where they are when a conversation goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kakeya.generation.cuts import unmarked
from kakeya.text.cuts_of_chat import LEAST_TOKENS
from kakeya.text.prefix import encode_ahead, encode_prefix
from kakeya.text.text import TextModel
from tests.gateway.toy import make_folder
from tests.text.texts import chat_of

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSIDE = (
    "{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ system if loop.first else '' }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""The system prompt stands in the first message of the user's, as gemma has it."""
LAST = INSIDE.replace("loop.first", "loop.last")
"""In the last one: no turn has what the one before it began with."""
REFUSES = "{{ raise_exception('no') if messages | length > 3 }}" + PLAIN
TEMPLATES = {"plain": PLAIN, "inside": INSIDE, "last": LAST, "refuses": REFUSES}
SYSTEM = {"role": "system", "content": "You are one of eight agents. " * 3}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    root = tmp_path_factory.mktemp("texts")
    return {
        name: TextModel(make_folder(root / name, template=template), lambda: 0.0)
        for name, template in TEMPLATES.items()
    }


async def cut(text: TextModel, messages: list[dict[str, str]]) -> tuple[list[int], tuple[int, ...]]:
    token_ids = await text.encode_chat(chat_of(*messages), at_most=1 << 20)
    return token_ids, await text.cuts_of(token_ids, chat_of(*messages), at_most=1 << 20)


async def made(folder: Path, template: str, wall: list[float]) -> TextModel:
    return await asyncio.to_thread(
        lambda: TextModel(make_folder(folder, template=template), lambda: wall[0])
    )


SAID = st.text(st.sampled_from("ab x\n"), max_size=60)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(["plain", "inside", "last"]), st.lists(SAID, min_size=1, max_size=7))
def test_the_cuts_of_a_conversation_that_goes_on_are_those_that_it_had(
    texts: dict[str, TextModel], name: str, said: list[str]
) -> None:
    async def check() -> None:
        before: tuple[list[int], tuple[int, ...]] = ([], ())
        messages = [SYSTEM]
        for number, content in enumerate(said):
            messages.append({"role": ("user", "assistant")[number % 2], "content": content})
            if number % 2:
                continue
            found = await cut(texts[name], messages)
            same = next(
                (i for i, (a, b) in enumerate(zip(before[0], found[0], strict=False)) if a != b),
                len(before[0]),
            )
            assert [c for c in found[1] if c < same] == [c for c in before[1] if c < same]
            assert list(found[1]) == sorted(set(found[1]))
            before = found

    asyncio.run(check())


@pytest.mark.parametrize("name", ["plain", "inside"])
async def test_all_who_share_a_system_prompt_have_a_cut_where_they_part(
    texts: dict[str, TextModel], name: str
) -> None:
    text = texts[name]
    stable = await encode_prefix(text, chat_of(SYSTEM), at_most=999)
    for content in ("hello", "x" * 40, "0"):
        token_ids, cuts = await cut(text, [SYSTEM, {"role": "user", "content": content}])
        assert token_ids[: len(stable)] == stable
        assert cuts[0] == len(stable)
    # What is declared ends there, with one token more that nobody computes.
    ahead, _ = unmarked(await encode_ahead(text, chat_of(SYSTEM), at_most=999))
    assert ahead[:-1] == stable


async def test_each_turn_begins_behind_a_cut_and_ended_one_token_behind_one(
    texts: dict[str, TextModel],
) -> None:
    text, messages, prompts = texts["plain"], [SYSTEM], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn} " * 5})
        prompts.append(await cut(text, messages))
        messages.append({"role": "assistant", "content": f"answer {turn} " * 5})
        ahead, cuts = unmarked(await encode_ahead(text, chat_of(*messages), at_most=1 << 20))
        prompts.append((ahead, cuts))
    last, cuts = prompts[-2]
    for earlier, known in prompts[:-2]:
        assert last[: len(earlier) - 1] == earlier[:-1]
        assert len(earlier) - 1 in cuts, "its KV ended there"
        assert [c for c in cuts if c < len(earlier) - 1] == [
            c for c in known if c < len(earlier) - 1
        ]


async def test_where_a_template_says_nothing_there_are_no_cuts(
    texts: dict[str, TextModel], tmp_path: Path
) -> None:
    user = {"role": "user", "content": "hello"}
    assert (await cut(texts["plain"], [user]))[1] == ()  # nothing worth it is shared
    assert (await cut(texts["refuses"], [SYSTEM, user]))[1]
    text = await made(tmp_path / "never", "{{ raise_exception('no') }}", [0.0])
    assert await text.cuts_of([1] * 99, chat_of(SYSTEM, user), at_most=999) == ()


async def test_a_prompt_of_another_day_is_cut_as_its_own(tmp_path: Path) -> None:
    today = [0.0]
    dated = "<|im_start|>{{ strftime_now('%Y-%m-%d') }}\n" + PLAIN
    text = await made(tmp_path / "dated", dated, today)
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    for day in (0.0, 86400.0 * 40):
        today[0] = day
        _, cuts = await cut(text, messages)
        assert (
            cuts[0] == len(await encode_prefix(text, chat_of(SYSTEM), at_most=999)) >= LEAST_TOKENS
        )
