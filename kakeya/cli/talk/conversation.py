"""A conversation with a model: what is sent with the next turn, and the commands that change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya.core.errors import InvalidArgument
from kakeya.core.settings import nearest

HELP = """/system TEXT   begin anew, with instructions to the model (none: without any)
/model NAME    go on with another model (none: show the models)
/adapter NAME  go on with a LoRA adapter of the model (none: without one)
/new           begin anew
/again         answer the last message anew
/help          show these lines
/quit          end; so does Ctrl-D. Ctrl-C ends an answer that runs"""
_COMMANDS = ("/system", "/model", "/adapter", "/new", "/again", "/help", "/quit")


@dataclass(frozen=True, slots=True)
class LineEffect:
    """What a line of the user does: `text` is shown, a turn is sent, or the chat ends."""

    text: str = ""
    asks: bool = False
    ends: bool = False


@dataclass(slots=True, kw_only=True)
class TerminalChat:
    """Turns so far; pure. `models` are the names that the node answers for."""

    base: str
    models: Sequence[str] = ()
    system: str = ""
    adapter: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model to ask for, with its adapter."""
        return f"{self.base}:{self.adapter}" if self.adapter else self.base

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of the next turn."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def take(self, line: str) -> LineEffect:
        """Take a line of the user: a command or a message. Raises InvalidArgument."""
        if not line.strip():
            return LineEffect()
        if not line.startswith("/"):
            self.turns.append({"role": "user", "content": line})
            return LineEffect(asks=True)
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match command:
            case "/quit" | "/exit":
                return LineEffect(ends=True)
            case "/help":
                return LineEffect(HELP)
            case "/new":
                self.turns.clear()
                return LineEffect("a new conversation")
            case "/system":
                self.system = rest
                self.turns.clear()
                return LineEffect(
                    "a new conversation, " + ("with" if rest else "without") + " a system"
                )
            case "/again":
                return self._again()
            case "/model":
                return self._use_model(rest)
            case "/adapter":
                self.adapter = rest
                return LineEffect(f"answers come from {self.model}")
        raise InvalidArgument(f"there is no {command}{nearest(command, _COMMANDS)}; see /help")

    def answered(self, text: str) -> None:
        """Note an answer, which may have been cut off; one without a word takes its question back,
        since a model would see two questions in a row."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def _again(self) -> LineEffect:
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if not self.turns:
            raise InvalidArgument("nothing was asked so far")
        return LineEffect(asks=True)

    def _use_model(self, name: str) -> LineEffect:
        if not name:
            return LineEffect(
                "\n".join(f"{'*' if it == self.model else ' '} {it}" for it in self.models)
            )
        base, adapter = name, ""
        if name not in self.models:
            base, _, adapter = name.rpartition(":")
        if base not in self.models:
            raise InvalidArgument(
                f"no model {name!r} is served{nearest(name, self.models)}; /model shows them"
            )
        self.base, self.adapter = base, adapter
        return LineEffect(f"answers come from {self.model}")
