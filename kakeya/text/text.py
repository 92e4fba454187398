"""Text <-> token ids of one model folder, without loading a model framework.

Message content cannot forge role markers (`guard`). A raw prompt of /v1/completions is encoded as
it stands, special tokens included: there the caller writes the whole prompt.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

from kakeya.core.errors import Unsupported
from kakeya.text.bound import PromptBound
from kakeya.text.cuts_of_chat import PromptCuts
from kakeya.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
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
from kakeya.text.guard import GuardedTemplate
from kakeya.text.stops import StopMatcher
from kakeya.text.template import ChatTemplate, Message, Tool

OFFLOAD_CHARS = 64 * 1024
"""Longer texts are tokenized in a thread: about 20 ms of work, off the event loop."""
_MESSAGE_CHARS = 64
"""Rendering a message takes as long as tokenizing so many characters, whatever its length."""
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
        named = special_tokens(folder)
        self._templates = self._load_templates(named, wall)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content: key for key, token in added.items() if token.special}
        eos = self.tokenizer.token_to_id(named.get("eos_token", ""))
        self.stop_token_ids = stop_ids(folder) | (frozenset() if eos is None else {eos})
        self.sampling = sampling_defaults(folder)
        spec = json.loads(self.tokenizer.to_str())
        is_byte_level = spec["decoder"] is not None and spec["decoder"]["type"] == "ByteLevel"
        self._bytes_of: dict[int, bytes] | None = {} if is_byte_level else None
        self._bound = PromptBound(spec)
        self._encoder = Encoder(self.tokenizer, spec)
        self._beginning = self._tokens_before_a_prompt()
        self._newline = tuple(self._encoder.encode("\n"))
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

    async def encode_chat(
        self, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Render and encode a conversation, with the tools that it may use.

        Raises Unsupported without a template or for tools that it does not show, InvalidArgument
        when the template refuses, and TooManyTokens as `encode` does, for the rendered text: a
        template may leave messages out.
        """
        size = sum(_MESSAGE_CHARS + len(str(message["content"])) for message in messages)
        if size <= OFFLOAD_CHARS and not tools:
            return self._encode_chat(messages, tools, at_most)
        return await asyncio.to_thread(self._encode_chat, messages, tools, at_most)

    async def cuts_of(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        *,
        at_most: int,
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """The cuts of a conversation that `encode_chat` encoded."""
        return await self._cuts.find(token_ids, messages, at_most=at_most, tools=tools)

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

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Start a new output text, which goes on from the text of the tokens `after`, if any."""
        if self._bytes_of is None:
            return WindowDetokenizer(self.tokenizer, after)
        return ByteDetokenizer(self.tokenizer, frozenset(self._special.values()), self._bytes_of)

    def stops(self, stops: Sequence[str]) -> StopMatcher | None:
        """A matcher of these stop strings; None for none."""
        return StopMatcher(stops, self._special) if stops else None

    def _encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], at_most: int
    ) -> list[int]:
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        template = self._templates.get(name)
        if template is None:
            raise Unsupported(
                f"{self._folder} has no chat template; ask /v1/completions with a plain prompt"
            )
        first, *others = template.pieces(messages, tools)
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

    def _load_templates(
        self, named: dict[str, str], wall: Callable[[], float]
    ) -> dict[str, GuardedTemplate]:
        try:
            return {
                name: GuardedTemplate(ChatTemplate(source, named, wall), self.tokenizer)
                for name, source in templates(self._folder).items()
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

    async def get(self, folder: str) -> TextModel:
        """Find or load. Raises Unsupported when the folder has no usable tokenizer."""
        return await asyncio.shield(self._begin(folder))

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
