"""Chat templates whose marks no caller can forge.

A template sees what was sent. Behind it, a special token counts only where the template wrote it,
all of its characters; any other place that reads like one is cut, so that it is encoded as the
plain text that it is. Guarded are the special tokens of a tokenizer, and the other added tokens
with which the template marks a conversation.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from kakeya.core.errors import InvalidArgument
from kakeya.text.chat import Chat
from kakeya.text.origin import SAID, Traced
from kakeya.text.template import TRIALS, ChatTemplate, trial_word


class GuardedTemplate:
    """One template, and the marks that only it may write."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        trial = self._trial()
        written = set(tokenizer.encode(trial, add_special_tokens=False).ids)
        self._marks = sorted(
            (
                token.content
                for token_id, token in tokenizer.get_added_tokens_decoder().items()
                # Some vocabularies have added tokens for blanks, which are everywhere.
                if token.special or (token_id in written and not token.content.isspace())
            ),
            key=lambda mark: -len(mark),
        )
        either = "|".join(map(re.escape, self._marks))
        self._any = re.compile(f"(?=({either}))" if either else "(?!)")
        self._untold = frozenset(
            [mark for mark in self._marks if len(mark) == 1]
            + [mark for _, mark in self._foreign(trial)]
        )
        """Marks whose places do not tell who wrote them; callers must do without them."""

    @property
    def shows_tools(self) -> bool:
        """As `ChatTemplate`."""
        return self._template.shows_tools

    def pieces(self, chat: Chat) -> list[str]:
        """Render a conversation; the pieces are to be encoded one by one.

        Raises as `ChatTemplate.render`, and InvalidArgument for text that could not be told from
        a mark of the template.
        """
        prompt = self._template.render(chat)
        cuts = {0, len(prompt)}
        said = ""
        for at, mark in self._foreign(prompt):
            if mark not in self._untold:
                cuts.add(at + _inside(prompt.origin[at : at + len(mark)]))
                continue
            said = said or json.dumps(
                [*chat.messages, *chat.tools, chat.kwargs], ensure_ascii=False, default=dict
            )
            if mark in said:
                raise InvalidArgument(
                    f"a message holds {mark!r}, which this model's chat template writes around "
                    "messages; leave it out",
                    param="messages",
                )
        places = sorted(cuts)
        spans = itertools.pairwise(places)
        return [str.__getitem__(prompt, slice(*span)) for span in spans] or [""]

    def _foreign(self, prompt: Traced) -> Iterator[tuple[int, str]]:
        """The places that read like a mark and are not the template's alone, overlaps included."""
        for found in self._any.finditer(prompt):
            at = found.start()
            if prompt.origin.find(SAID, at, at + len(found[1])) < 0:
                continue
            for mark in self._marks:
                end = at + len(mark)
                if prompt.startswith(mark, at) and prompt.origin.find(SAID, at, end) >= 0:
                    yield at, mark

    def _trial(self) -> Traced:
        """The longest trial that the template renders; its contents hold no mark."""
        for roles in TRIALS:
            try:
                messages = [{"role": role, "content": trial_word(role)} for role in roles]
                return self._template.render(Chat(messages=tuple(messages)))
            except InvalidArgument:
                continue
        return Traced()


def _inside(origin: str) -> int:
    """The place to cut a foreign mark: where its origin changes, else after one character."""
    return next((i for i, one in enumerate(origin) if one != origin[0]), 1)
