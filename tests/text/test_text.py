"""Text in, text out: the laws that hold however tokens are cut into frames."""

from __future__ import annotations

import asyncio
import json
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kakeya.core.errors import Unsupported
from kakeya.text import text as text_module
from kakeya.text.bound import PromptBound, TooManyTokens
from kakeya.text.text import OFFLOAD_CHARS, TextModel, Texts
from tests.gateway.toy import CountingTokenizer, make_folder, make_tokenizer
from tests.mlx.encoder_reference import write_tokenizer
from tests.text.texts import NOW, chat_of, text_model

MANY = 1 << 20
TINY = Path(__file__).parents[2] / "kakeya" / "models" / "kakeya-tiny"


@pytest.fixture(scope="module", autouse=True)
def _text_is_loaded():
    """Before any test with an event loop, which may not read files."""
    text_model()


async def test_a_long_text_encodes_the_same_off_the_loop():
    model = text_model()
    text = "hello world " * (OFFLOAD_CHARS // 8)
    assert await model.encode(text, at_most=MANY) == model.tokenizer.encode(text).ids
    chat = await model.encode_chat(chat_of({"role": "user", "content": text}), at_most=MANY)
    assert len(chat) > len(await model.encode(text, at_most=MANY))


async def test_many_messages_are_rendered_off_the_loop_however_little_they_say(tmp_path):
    rendered_by = []

    class Watched(TextModel):
        def _encode_chat(self, *conversation):
            rendered_by.append(threading.current_thread())
            return super()._encode_chat(*conversation)

    model = await asyncio.to_thread(lambda: Watched(make_folder(tmp_path), lambda: NOW))
    for count in (10, 2000):
        await model.encode_chat(chat_of(*[{"role": "user", "content": ""}] * count), at_most=MANY)
    assert [thread is threading.main_thread() for thread in rendered_by] == [True, False]


async def test_plain_content_encodes_as_the_whole_prompt_does():
    model = text_model()
    ids = await model.encode_chat(chat_of({"role": "user", "content": "hello world"}), at_most=MANY)
    prompt = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert ids == model.tokenizer.encode(prompt).ids


def test_stop_tokens_come_from_both_configurations(tmp_path):
    assert TextModel(make_folder(tmp_path), lambda: NOW).stop_token_ids == {0, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert TextModel(tmp_path, lambda: NOW).stop_token_ids == {1, 2}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert TextModel(tmp_path, lambda: NOW).stop_token_ids == {2}


def test_a_broken_folder_is_named(tmp_path):
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        TextModel(tmp_path, lambda: NOW)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Unsupported, match=r"tokenizer\.json cannot be loaded"):
        TextModel(tmp_path, lambda: NOW)
    make_folder(tmp_path, template="{% if %}")
    with pytest.raises(Unsupported, match="no valid jinja2"):
        TextModel(tmp_path, lambda: NOW)
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(Unsupported, match="not a JSON object"):
        TextModel(tmp_path, lambda: NOW)


@pytest.mark.skipif(not TINY.is_dir(), reason="the embedded model is not built yet")
async def test_the_embedded_model_has_a_tokenizer_and_a_template():
    model = await asyncio.to_thread(TextModel, TINY, lambda: NOW)
    ids = await model.encode_chat(
        chat_of({"role": "user", "content": "def f(x): # 日本語 😀"}), at_most=MANY
    )
    running = model.detokenizer()
    decoded = "".join(running.feed((token,)) for token in ids) + running.finish()
    assert decoded == model.tokenizer.decode(ids)
    assert "def f(x): # 日本語 😀" in decoded
    assert model.stop_token_ids
    assert make_tokenizer().get_vocab_size() < model.tokenizer.get_vocab_size()


@given(st.text(max_size=200), st.sampled_from(["", "<|im_end|>", "hello world"]), st.integers(0, 9))
def test_no_text_has_fewer_tokens_than_its_length_tells(text, word, times):
    model = text_model()
    whole = text + word * times
    assert bound_of(model.tokenizer).least_tokens([whole]) <= len(model.tokenizer.encode(whole).ids)


def test_composing_never_shrinks_a_text_more_than_the_bound_allows():
    """Each character that NFC can make, against the longest text that it can be made of."""

    def utf8(text):
        return len(text.encode("utf-8", "surrogatepass"))

    longest = {}
    for code in range(0x110000):
        composed = unicodedata.normalize("NFC", chr(code))
        if len(composed) == 1:
            longest[composed] = max(longest.get(composed, 0), utf8(chr(code)))

    def spelled(character):
        parts = unicodedata.decomposition(character).split()
        if not parts or parts[0].startswith("<"):
            return longest.get(character, utf8(character))
        apart = sum(spelled(chr(int(part, 16))) for part in parts)
        return max(longest.get(character, 0), apart)

    assert max(spelled(one) / utf8(one) for one in longest) == 3.5


def bound_of(tokenizer: Tokenizer, **changes) -> PromptBound:
    return PromptBound({**json.loads(tokenizer.to_str()), **changes})


LOSSY = {"id": 0, "content": "<x>", "lstrip": False, "rstrip": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFKC"}},
        {"added_tokens": [LOSSY]},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
    ],
)
def test_a_tokenizer_that_may_lose_bytes_promises_nothing(changes):
    assert bound_of(make_tokenizer()).least_tokens(["a" * 1000]) > 0
    composing = bound_of(make_tokenizer(), normalizer={"type": "NFC"})
    assert composing.least_tokens(["a" * 1000]) == bound_of(make_tokenizer()).least_tokens(
        ["a" * 1000]
    )
    assert 0 < composing.least_tokens(["é" * 500]) < composing.least_tokens(["a" * 1000])
    assert bound_of(make_tokenizer(), **changes).least_tokens(["a" * 1000]) == 0


async def test_what_cannot_fit_is_refused_by_its_length_alone():
    model = text_model()
    text = "hello world " * 1000
    counted = len(await model.encode(text, at_most=MANY))
    with pytest.raises(TooManyTokens, match="at least"):
        await model.encode(text, at_most=100)
    with pytest.raises(TooManyTokens) as caught:
        await model.encode_chat(chat_of({"role": "user", "content": text}), at_most=100)
    assert 100 < caught.value.least_tokens <= counted + 20


BOS, EOS = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(
    ("single", "before"), [(f"{BOS} $A", [1]), (f"{BOS} $A {EOS}", [1]), (f"$A {EOS}", [])]
)
async def test_a_prompt_begins_once_and_is_not_ended(tmp_path, single, before):
    path = make_folder(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[(BOS, 1), (EOS, 2)]
    )
    tokenizer.save(str(path))
    model = await asyncio.to_thread(TextModel, tmp_path, lambda: NOW)
    plain = make_tokenizer().encode("hello").ids
    assert await model.encode("hello", at_most=MANY) == before + plain
    assert await model.encode(BOS + "hello", at_most=MANY) == [1, *plain]
    assert await model.encode("hello" + EOS, at_most=MANY) == [*before, *plain, 2]


async def test_the_template_of_tools_takes_the_place_of_the_other(tmp_path):
    folder = make_folder(tmp_path, template="{{ messages[0].content }}")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools[0].name }}:{{ messages[0].content }}")
    model = await asyncio.to_thread(TextModel, tmp_path, lambda: NOW)
    hello = {"role": "user", "content": "hello"}
    shown = [
        model.tokenizer.decode(await model.encode_chat(chat_of(hello, tools=tools), at_most=MANY))
        for tools in ((), ({"name": "look"},))
    ]
    assert shown == ["hello", "look:hello"]


async def test_a_tokenizer_file_that_cuts_or_pads_changes_no_prompt(tmp_path):
    path = make_folder(tmp_path) / "tokenizer.json"
    cutting = Tokenizer.from_file(str(path))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=9)
    cutting.save(str(path))
    model = await asyncio.to_thread(TextModel, tmp_path, lambda: NOW)
    text = "hello world, this is text"
    assert await model.encode(text, at_most=MANY) == make_tokenizer().encode(text).ids
    assert await model.encode("a", at_most=MANY) == make_tokenizer().encode("a").ids


async def test_a_folder_is_loaded_before_its_first_request(tmp_path: Path) -> None:
    texts = Texts(lambda: NOW)
    folder = str(make_folder(tmp_path / "model"))
    texts.renew(folder)
    loading = texts._loaded[folder]
    assert await texts.get(folder) is await loading
    texts.renew(folder)  # its weights were loaded anew, and its files are the same
    assert await texts.get(folder) is await loading


async def test_what_cannot_be_loaded_ahead_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    texts = Texts(lambda: NOW)
    texts.renew(str(tmp_path))
    await asyncio.wait(texts._loaded.values())
    with pytest.raises(Unsupported):
        await texts.get(str(tmp_path))
    make_folder(tmp_path)
    assert (await texts.get(str(tmp_path))).stop_token_ids == {0, 2}


async def test_a_history_that_was_learned_from_its_tokens_is_not_encoded_again() -> None:
    said = [
        {"role": "system", "content": "Answer in one word, please: é 😀 <b>"},
        {"role": "user", "content": "What is the capital of the country next to this one?"},
    ]
    before = await asyncio.to_thread(TextModel, TINY, lambda: NOW)
    token_ids = await before.encode_chat(chat_of(*said), at_most=MANY)
    model = await asyncio.to_thread(TextModel, TINY, lambda: NOW)
    await asyncio.to_thread(model.learn, [token_ids[:-1]])  # as its KV is kept: all but the last
    counting = model._encoder._tokenizer = CountingTokenizer(model.tokenizer)
    assert await model.encode_chat(chat_of(*said), at_most=MANY) == token_ids
    assert not any("capital" in text or "one word" in text for text in counting.texts)


async def test_what_is_learned_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "LEARNED_TOKENS", 5)
    model = await asyncio.to_thread(TextModel, TINY, lambda: NOW)
    counting = model._encoder._tokenizer = CountingTokenizer(model.tokenizer)
    words = [model.tokenizer.encode(word).ids for word in ("first word", "second word", "third")]
    model.learn([words[0] * 2, words[1], words[2]])
    assert counting.texts == ["first wordfirst word"]


WORDPIECE = ["The capital of a", "the capital of france", "", "bread"]


@pytest.mark.parametrize(("cut_to", "lengths"), [(None, [6, 6, 2, 3]), (4, [4, 4, 2, 3])])
async def test_an_encoders_text_keeps_both_its_special_tokens_when_it_is_cut_off(
    tmp_path: Path, cut_to: int | None, lengths: list[int]
) -> None:
    write_tokenizer(tmp_path)
    text = await asyncio.to_thread(TextModel, tmp_path, lambda: NOW)
    for times in (1, 2000):  # here, and in a thread
        found = await text.encode_whole(WORDPIECE * times, cut_to=cut_to)
        assert [len(ids) for ids in found] == lengths * times
        assert all((ids[0], ids[-1]) == (2, 3) for ids in found)
