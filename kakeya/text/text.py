"""Text <-> token ids of one model folder, without loading a model framework.

Message content cannot forge role markers (`guard`). A raw prompt of /v1/completions is encoded as
it stands, special tokens included: there the caller writes the whole prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

from kakeya.core.errors import Unsupported
from kakeya.generation.manifest import GivenTemplate
from kakeya.text.bound import PromptBound
from kakeya.text.chat import Chat
from kakeya.text.cuts_of_chat import PromptCuts
from kakeya.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    bytes_of,
)
from kakeya.text.encoder import Encoder
from kakeya.text.folder import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    sampling_defaults,
    special_tokens,
    stamps,
    stop_ids,
    templates,
)
from kakeya.text.grammar import AnswerShape, ModelMarks, answer_grammar
from kakeya.text.guard import GuardedTemplate
from kakeya.text.stops import StopMatcher
from kakeya.text.template import ChatTemplate
from kakeya.text.tools.answer import AnswerReader
from kakeya.text.tools.calls import functions_of
from kakeya.text.tools.families import JSON_FAMILY, family_of
from kakeya.text.tools.thinking import thinking_marks

OFFLOAD_CHARS = 64 * 1024
"""Longer texts are tokenized in a thread: about 20 ms of work, off the event loop."""
_MESSAGE_CHARS = 64
"""Rendering a message takes as long as tokenizing so many characters, whatever its length."""
_MARK_TOKENS = 32
"""Tokens at the end of a prompt that hold a mark of thoughts, in any spelling."""
_MOST_VARIANTS = 32
"""Texts with given templates; those of earlier reloads go first."""
LEARNED_TOKENS = 32 * 1024
"""Most tokens that are encoded ahead of requests, for one ready engine."""


class TextModel:
    """The tokenizer, template and stop tokens of one folder. Loading blocks; use `Texts`."""

    def __init__(self, folder: Path, wall: Callable[[], float]) -> None:
        self.stamps = stamps(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Unsupported(
                f"{folder} has no tokenizer.json, so this model is served over gRPC token ids only"
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as fault:
            raise Unsupported(f"{path} cannot be loaded: {fault}") from fault
        self.tokenizer.no_truncation()  # a prompt that does not fit is refused, never cut
        self.tokenizer.no_padding()
        self._folder = folder
        self._wall = wall
        self.thinking = thinking_marks(self.tokenizer.get_vocab())
        """The marks around thoughts; None for a model that has none."""
        self._take_templates(templates(folder))
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content: key for key, token in added.items() if token.special}
        eos = self.tokenizer.token_to_id(special_tokens(folder).get("eos_token", ""))
        self.stop_token_ids = stop_ids(folder) | (frozenset() if eos is None else {eos})
        self.sampling = sampling_defaults(folder)
        spec = json.loads(self.tokenizer.to_str())
        is_byte_level = spec["decoder"] is not None and spec["decoder"]["type"] == "ByteLevel"
        self._bytes_of: dict[frozenset[int], dict[int, bytes]] | None = (
            {} if is_byte_level else None
        )
        self._bound = PromptBound(spec)
        self._encoder = Encoder(self.tokenizer, spec)
        self._beginning = self._tokens_before_a_prompt()
        self._newline = tuple(self._encoder.encode("\n"))

    def with_template(self, source: str) -> TextModel:
        """The same text with another chat template, in place of all of the folder. Blocks."""
        other = copy.copy(self)
        other._take_templates({DEFAULT_TEMPLATE: source})  # noqa: SLF001 - a copy of this object
        return other

    def _take_templates(self, sources: dict[str, str]) -> None:
        self._templates = self._load_templates(sources)
        vocabulary = self.tokenizer.get_vocab()
        source = sources.get(TOOL_TEMPLATE, sources.get(DEFAULT_TEMPLATE, ""))
        self._knows_thoughts = self.thinking is not None and self.thinking.are_in(source)
        self.tool_family = family_of(source, vocabulary) if self.shows_tools else JSON_FAMILY
        """The syntax in which the model calls tools."""
        with contextlib.suppress(ValueError):  # reads its parser file here, off the event loop
            self.tool_family.parse("", ())
        self._cuts = PromptCuts(self)

    async def encode(self, prompt: str, *, at_most: int) -> list[int]:
        """Encode a raw prompt; special tokens in it are special.

        The tokens with which prompts of this tokenizer begin are put in front unless it begins with
        them; none is put behind it, since the answer goes on from there.

        Raises TooManyTokens when its length alone tells that it has more than `at_most`; a
        shorter text may still have more.
        """
        self._bound.check((prompt,), at_most)
        if len(prompt) <= OFFLOAD_CHARS:
            return self._encode_raw(prompt)
        return await asyncio.to_thread(self._encode_raw, prompt)

    async def encode_whole(
        self, texts: Sequence[str], *, cut_to: int | None = None
    ) -> list[list[int]]:
        """Encode texts for an encoder, each with the special tokens around it; those in a text are
        special, too.

        A text is cut off so that it has at most `cut_to` tokens with these; None = it is not.
        """
        if sum(map(len, texts)) <= OFFLOAD_CHARS:
            return self._encode_whole(texts, cut_to)
        return await asyncio.to_thread(self._encode_whole, texts, cut_to)

    async def encode_chat(self, chat: Chat, *, at_most: int) -> list[int]:
        """Render and encode a conversation, with the tools that it may use.

        Raises Unsupported without a template or for what it cannot show, InvalidArgument when the
        template refuses, and TooManyTokens as `encode` does, for the rendered text: a template may
        leave messages out.
        """
        size = sum(_MESSAGE_CHARS + len(str(message["content"])) for message in chat.messages)
        if size <= OFFLOAD_CHARS and not chat.tools:
            return self._encode_chat(chat, at_most)
        return await asyncio.to_thread(self._encode_chat, chat, at_most)

    async def cuts_of(
        self, token_ids: Sequence[int], chat: Chat, *, at_most: int
    ) -> tuple[int, ...]:
        """The cuts of a conversation that `encode_chat` encoded."""
        return await self._cuts.find(token_ids, chat, at_most=at_most)

    def learn(self, histories: Iterable[Sequence[int]]) -> None:
        """Encode the texts of histories that are likely to come again.

        A request that goes on from one then waits for its new part only. Blocks meanwhile.
        """
        left = LEARNED_TOKENS
        for token_ids in histories:
            if left <= 0:
                return
            left -= len(token_ids)
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
            self._encoder.encode(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return DEFAULT_TEMPLATE in self._templates

    @property
    def shows_tools(self) -> bool:
        """Whether the template itself shows tools; otherwise they are written as plain text."""
        template = self._templates.get(TOOL_TEMPLATE, self._templates.get(DEFAULT_TEMPLATE))
        return template is not None and template.shows_tools

    @property
    def thinks(self) -> bool:
        """Whether the model writes thoughts: it has their marks, and its template knows them."""
        return self.thinking is not None and self._knows_thoughts

    def reader(
        self, token_ids: Sequence[int], chat: Chat, *, may_call: bool = True
    ) -> AnswerReader | None:
        """A reader of the answer to a conversation that was encoded to these tokens; None where the
        answer can have neither thoughts nor calls.

        The special tokens that it needs, `AnswerReader.shown`, are to be given to `detokenizer` and
        `stops`. Calls are read where the conversation has tools and `may_call` says so.
        """
        family = self.tool_family if chat.tools and may_call else None
        if family is None and self.thinking is None:
            return None
        marks = [*([family.start, family.end, *family.inner_marks] if family is not None else [])]
        if self.thinking is not None:
            marks += (self.thinking.start, self.thinking.end)
        return AnswerReader(
            thinking=self.thinking,
            is_thinking=self._is_thinking(token_ids, chat),
            family=family,
            tools=chat.tools,
            shown=frozenset(
                token_id
                for text, token_id in self._special.items()
                if any(text in mark for mark in marks)
            ),
        )

    async def grammar(self, token_ids: Sequence[int], chat: Chat, shape: AnswerShape) -> str | None:
        """The grammar that forces the answer to a conversation that was encoded to these tokens.

        None where any text will do. Raises InvalidArgument as `answer_grammar`.
        """
        functions = functions_of(chat.tools)
        if not shape.forces(functions):
            return None
        added = self.tokenizer.get_added_tokens_decoder().items()
        may_think = not chat.continues_last and self.thinking is not None
        is_behind = self.thinking is not None and self.thinking.is_closed(self._end_of(token_ids))
        is_thinking = self._is_thinking(token_ids, chat)
        marks = ModelMarks(
            family=self.tool_family,
            tokens={token.content: token_id for token_id, token in added},
            thinking=self.thinking if is_thinking or (may_think and not is_behind) else None,
            is_thinking=is_thinking,
        )
        return await asyncio.to_thread(answer_grammar, shape, functions, marks)

    def _end_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids[-_MARK_TOKENS:], skip_special_tokens=False))

    def _is_thinking(self, token_ids: Sequence[int], chat: Chat) -> bool:
        """Whether the answer to a conversation, encoded to these tokens, begins inside thoughts."""
        if self.thinking is None:
            return False
        end = self._end_of(token_ids)
        said = str(chat.messages[-1]["content"]) if chat.continues_last else ""
        return self.thinking.is_open(end) or self.thinking.is_left_open(said)

    def detokenizer(
        self, after: Sequence[int] = (), *, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Start a new output text, which goes on from the text of the tokens `after`, if any.

        No text of special tokens is in it but that of those `shown`.
        """
        hidden = frozenset(self._special.values()) - shown
        if self._bytes_of is None:
            return WindowDetokenizer(self.tokenizer, hidden, after)
        return ByteDetokenizer(self.tokenizer, hidden, self._bytes_of.setdefault(hidden, {}))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token by itself; b"" for an unknown id."""
        is_byte_level = self._bytes_of is not None
        return bytes_of(self.tokenizer, token_id, is_byte_level=is_byte_level)

    def stops(
        self, stops: Sequence[str], *, shown: frozenset[int] = frozenset()
    ) -> StopMatcher | None:
        """A matcher of these stop strings in a text with these special tokens; None for none."""
        hidden = {text: one for text, one in self._special.items() if one not in shown}
        return StopMatcher(stops, hidden) if stops else None

    def _encode_whole(self, texts: Sequence[str], cut_to: int | None) -> list[list[int]]:
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        room = None if cut_to is None else cut_to - self.tokenizer.num_special_tokens_to_add(False)
        for encoding in encoded:
            if room is not None and len(encoding.ids) > room:
                encoding.truncate(max(0, room))
        return [self.tokenizer.post_process(encoding).ids for encoding in encoded]

    def _template_of(self, chat: Chat) -> GuardedTemplate:
        name = (
            TOOL_TEMPLATE if chat.tools and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        )
        template = self._templates.get(name)
        if template is None:
            raise Unsupported(
                f"{self._folder} has no chat template; ask /v1/completions with a plain prompt"
            )
        return template

    def _encode_chat(self, chat: Chat, at_most: int) -> list[int]:
        first, *others = self._template_of(chat).pieces(chat)
        self._bound.check((first, *others), at_most)
        ids = self._encoder.encode(first)
        for piece in others:
            ids += self._encode_inside(piece)
        return ids

    def _encode_inside(self, piece: str) -> list[int]:
        """Encode the rest of a text that was cut.

        Many tokenizers put a blank in front of a text; behind a line feed it goes before that.
        """
        ids = self._encoder.encode("\n" + piece)
        count = len(self._newline)
        is_apart = tuple(ids[:count]) == self._newline
        return ids[count:] if is_apart else self._encoder.encode(piece)

    def _encode_raw(self, prompt: str) -> list[int]:
        ids = self._encoder.encode(prompt)
        count = len(self._beginning)
        return ids if tuple(ids[:count]) == self._beginning else [*self._beginning, *ids]

    def _tokens_before_a_prompt(self) -> tuple[int, ...]:
        plain, whole = (
            self.tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True)
        )
        before = range(len(whole) - len(plain) + 1)
        found = (at for at in before if whole[at : at + len(plain)] == plain)
        return tuple(whole[: next(found, 0)])

    def _load_templates(self, sources: dict[str, str]) -> dict[str, GuardedTemplate]:
        named = special_tokens(self._folder)
        try:
            return {
                name: GuardedTemplate(ChatTemplate(source, named, self._wall), self.tokenizer)
                for name, source in sources.items()
                if name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
            }
        except jinja2.TemplateError as fault:
            raise Unsupported(
                f"the chat template in {self._folder} is no valid jinja2 template: {fault}"
            ) from fault


class Texts:
    """The text models of a node, each loaded once, in a thread."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._loaded: dict[str, asyncio.Task[TextModel]] = {}
        self._doubted: dict[str, TextModel] = {}
        self._variants: dict[tuple[str, str], tuple[TextModel, TextModel]] = {}
        """By folder and template, each beside the text that it was made from."""

    async def get(self, folder: str, template: GivenTemplate | None = None) -> TextModel:
        """Find or load; with a chat template in place of the folder's, if one is given. Raises
        Unsupported when the folder has no usable tokenizer."""
        text = await asyncio.shield(self._begin(folder))
        if template is None:
            return text
        key = (folder, template.source)
        made_from, variant = self._variants.get(key, (None, text))
        if made_from is not text:
            variant = await asyncio.to_thread(text.with_template, template.source)
            self._variants[key] = (text, variant)
            while len(self._variants) > _MOST_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return variant

    def renew(self, folder: str) -> None:
        """Load a folder, or check whether its files have changed, for the next request.

        To be called when its weights were loaded: text and weights belong together.
        """
        task = self._loaded.get(folder)
        if task is not None and task.done() and _may_be_used(task):
            self._doubted[folder] = self._loaded.pop(folder).result()
        self._begin(folder).add_done_callback(_may_be_used)  # the next request gets the error

    def _begin(self, folder: str) -> asyncio.Task[TextModel]:
        task = self._loaded.get(folder)
        if task is None or not _may_be_used(task):
            load = functools.partial(self._load, Path(folder), self._doubted.pop(folder, None))
            task = self._loaded[folder] = asyncio.ensure_future(asyncio.to_thread(load))
        return task

    def _load(self, folder: Path, before: TextModel | None) -> TextModel:
        if before is not None and before.stamps == stamps(folder):
            return before
        return TextModel(folder, self._wall)


def _may_be_used(task: asyncio.Task[TextModel]) -> bool:
    return not task.done() or not (task.cancelled() or task.exception() is not None)
