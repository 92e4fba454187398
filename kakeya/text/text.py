"""Text <-> token ids of one model folder, without loading a model framework.

`TextModel` encodes prompts and knows the stop tokens; `Detokenizer` turns committed tokens into
text as they come; `StopMatcher` holds back text that may become a stop string. The last two are
sans-I/O and give the same text however the tokens were cut into frames.

Message content cannot forge role markers: where a special token's text occurs in a message, the
prompt is encoded in two pieces that meet inside it, so it stays the plain text that it is. A raw
prompt of /v1/completions is encoded as it stands, special tokens included: there the caller writes
the whole prompt.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kakeya.core.errors import Unsupported
from kakeya.text.bound import PromptBound
from kakeya.text.byte_level import BYTE_OF
from kakeya.text.cuts_of_chat import PromptCuts
from kakeya.text.encoder import Encoder
from kakeya.text.marker import Marker
from kakeya.text.template import (
    ChatTemplate,
    Message,
    Tool,
    load_template,
    read_config,
    special_tokens,
)

OFFLOAD_CHARS = 64 * 1024
"""Longer texts are tokenized in a thread: about 20 ms of work, off the event loop."""
_MESSAGE_CHARS = 64
"""Rendering a message takes as long as tokenizing so many characters, whatever its length."""
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_Stamps = tuple[tuple[str, int, int], ...]
"""(name, time of the last change in ns, bytes) of each file that is there."""
LEARNED_TOKENS = 32 * 1024
"""Most tokens that are encoded ahead of requests, for one ready engine."""
_WINDOW_TOKENS = 64
"""Most tokens that a decoder without a byte table holds back while its text is not settled."""


class TextModel:
    """The tokenizer, template and stop tokens of one folder. Loading blocks; use `Texts`."""

    def __init__(self, folder: Path, wall: Callable[[], float]) -> None:
        self.stamps = _stamps(folder)
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
        self._template: ChatTemplate | None = load_template(folder, wall)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(key for key, token in added.items() if token.special)
        self._marker = Marker([added[key].content for key in sorted(self._special_ids)])
        self.stop_token_ids = self._stop_tokens()
        spec = json.loads(self.tokenizer.to_str())
        is_byte_level = spec["decoder"] is not None and spec["decoder"]["type"] == "ByteLevel"
        self._bytes_of: dict[int, bytes] | None = {} if is_byte_level else None
        self._bound = PromptBound(spec)
        self._encoder = Encoder(self.tokenizer, spec)
        self._cuts = PromptCuts(self)

    async def encode(self, prompt: str, *, at_most: int) -> list[int]:
        """Encode a raw prompt; special tokens in it are special, and a BOS is added if usual.

        Raises TooManyTokens when its length alone tells that it has more than `at_most`; a
        shorter text may still have more.
        """
        self._bound.check((prompt,), at_most)
        if len(prompt) <= OFFLOAD_CHARS:
            return self._encode((prompt,), add_special_tokens=True)
        return await asyncio.to_thread(self._encode, (prompt,), add_special_tokens=True)

    async def encode_chat(
        self, messages: Sequence[Message], *, at_most: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Render and encode a conversation, with the tools that it may use.

        Raises Unsupported without a template or for tools that it does not show, InvalidArgument
        when the template refuses, and TooManyTokens as `encode` does, for the rendered text: a
        template may leave messages out.
        """
        size = sum(_MESSAGE_CHARS + len(message["content"]) for message in messages)
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
            self._encode((text,), add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Start a new output text."""
        if self._bytes_of is None:
            return WindowDetokenizer(self.tokenizer)
        return ByteDetokenizer(self.tokenizer, self._special_ids, self._bytes_of)

    def _encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], at_most: int
    ) -> list[int]:
        if self._template is None:
            raise Unsupported(
                f"{self._folder} has no chat template; ask /v1/completions with a plain prompt"
            )
        marker = self._marker.choose(messages, tools)
        marked = [self._marker.mark(message, marker) for message in messages]
        marked_tools = [self._marker.mark_tool(tool, marker) for tool in tools]
        pieces = self._template.render(marked, marked_tools).split(marker)
        self._bound.check(pieces, at_most)
        return self._encode(pieces, add_special_tokens=False)

    def _encode(self, pieces: Iterable[str], *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._encoder.encode(piece, add_special_tokens=add_special_tokens)
        return ids

    def _stop_tokens(self) -> frozenset[int]:
        declared = read_config(self._folder / "generation_config.json").get("eos_token_id")
        ids = declared if isinstance(declared, list) else [declared]
        found = {entry for entry in ids if isinstance(entry, int) and not isinstance(entry, bool)}
        config = read_config(self._folder / "tokenizer_config.json")
        eos = self.tokenizer.token_to_id(special_tokens(config).get("eos_token", ""))
        return frozenset(found if eos is None else found | {eos})


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
        if before is not None and before.stamps == _stamps(folder):
            return before
        return TextModel(folder, self._wall)


def _may_be_used(task: asyncio.Task[TextModel]) -> bool:
    return not task.done() or not (task.cancelled() or task.exception() is not None)


def _stamps(folder: Path) -> _Stamps:
    """The state of the files that a folder's text comes from. Blocks."""
    found = []
    for name in _TEXT_FILES:
        with contextlib.suppress(OSError):
            seen = (folder / name).stat()
            found.append((name, seen.st_mtime_ns, seen.st_size))
    return tuple(found)


class ByteDetokenizer:
    """Byte-level vocabularies: each token is a fixed string of bytes. O(1) per token."""

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], bytes_of: dict[int, bytes]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is settled by them, never half a character."""
        known = self._bytes_of
        try:
            return self._utf8.decode(b"".join(map(known.__getitem__, token_ids)))
        except KeyError:
            for token_id in token_ids:
                known[token_id] = self._look_up(token_id)
            return self.feed(token_ids)

    def finish(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _look_up(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()


class WindowDetokenizer:
    """Any other vocabulary: decodes a short window of tokens again and returns the new text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0  # window[:settled] is shown already; it gives the rest its context

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is settled by them, never half a character."""
        shown = ""
        for token_id in token_ids:
            self._window.append(token_id)
            shown += self._new_text(held_back="\ufffd")
        return shown

    def finish(self) -> str:
        """End the text; an unfinished character becomes U+FFFD."""
        return self._new_text(held_back=None)

    def _new_text(self, *, held_back: str | None) -> str:
        whole = self._tokenizer.decode(self._window)
        before = self._tokenizer.decode(self._window[: self._settled])
        is_long = len(self._window) - self._settled > _WINDOW_TOKENS
        if len(whole) <= len(before) and not is_long:
            return ""
        if held_back is not None and whole.endswith(held_back) and not is_long:
            return ""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        return whole[len(before) :]


Detokenizer = ByteDetokenizer | WindowDetokenizer


class StopMatcher:
    """Ends a text at the first stop string that completes in it, and shows nothing of that string.

    Theory: one Knuth-Morris-Pratt automaton per stop string, fed character by character. Its state
    is the length of the longest suffix of the text that begins the string; the greatest state is
    how much must be held back. If two complete at the same character, the longer one cuts. So the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = [_prefix_lengths(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._first = re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]")
        self.is_stopped = False

    def feed(self, piece: str) -> str:
        """Add text; returns the text that may be shown; after a stop, nothing more."""
        if self.is_stopped:
            return ""
        if not self._held and self._first.search(piece) is None:
            return piece
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            matched = self._step(text[end])
            if matched:
                self.is_stopped = True
                self._held = ""
                return text[: end + 1 - matched]
        keep = max(self._states)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """End the text; returns the part that was held back."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, character: str) -> int:
        """Advance every automaton; returns the length of the longest string that completed."""
        matched = 0
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._fallbacks[index][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                matched = max(matched, state)
                state = 0
            self._states[index] = state
        return matched


def _prefix_lengths(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that also ends it."""
    lengths = [0]
    state = 0
    for character in stop[1:]:
        while state and stop[state] != character:
            state = lengths[state - 1]
        state += stop[state] == character
        lengths.append(state)
    return lengths
