"""The line of the log for a request that was answered or refused, over HTTP and gRPC alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kakeya.core.log import event, event_of_many

_log = logging.getLogger("kakeya.requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLine:
    """What the line says of a generation. `node` is the label of the peer, or the name of the
    backend, that made it; "" = this node did. `prefill_s` of the seconds to the first token, None =
    there was none, are the engine's work on the prompt."""

    model: str
    node: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first_token_s: float | None = None
    prefill_s: float | None = None

    def fields(self) -> dict[str, object]:
        """As fields of the line; `waited_s` is for memory, a load, a place or the text."""
        told: dict[str, object] = {
            "model": self.model,
            "node": self.node or "this",
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
        }
        if self.first_token_s is not None:
            told["first_token_s"] = self.first_token_s
            if self.prefill_s is not None:
                told["waited_s"] = max(0.0, self.first_token_s - self.prefill_s)
        return told


def log_answered(
    *,
    method: str,
    path: str,
    status: str | int,
    seconds: float,
    request_id: str,
    made: GenerationLine | None,
    is_refused: bool,
    level: int = logging.INFO,
    more: dict[str, str] | None = None,
) -> None:
    """Write the line. Refusals that differ in ids alone are folded: a client that is refused in a
    loop would fill the log. `made` None = there is no generation; `more` are further ids."""
    ids = {"request_id": request_id} | (more or {})
    has_begun = made is not None and made.first_token_s is not None
    fields: dict[str, object] = {
        "method": method,
        "path": path,
        "status": status,
        "seconds": seconds,
        **ids,
    }
    fields |= {} if made is None else made.fields()
    if is_refused and not has_begun:
        event_of_many(_log, "answered", fields, apart=tuple(ids), level=level)
    else:
        event(_log, "answered", level=level, **fields)
