"""POST /v1/messages/count_tokens: how many tokens a request's prompt has, exactly, as its model
reads it. Needs the model's text, not its weights."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from kakeya.gateway.anthropic.requests import read_chat
from kakeya.gateway.coordinator_fields import read_with_fields
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.receipt import note_left_out
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.prompts import with_thinking
from kakeya.generation.waiting import WaitTeller


class CountRoute:
    """The ASGI application behind the path."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        generations = self._generations

        asked, fields = await read_with_fields(scope, receive, generations.limits, read_chat)
        note_left_out(scope, asked.params.left_out)
        caller = fields.named(scope)
        named, profile = generations.for_client(asked, caller, scope)
        wanted, _ = with_thinking(named, profile.spec.thinking)
        model = generations.names.find(wanted.params.model, caller)
        with generations.admitted(share_of(caller, scope), asked.params.user):
            async with generations.connection(receive, send, WaitTeller(model.waits_for)) as client:
                count = await generations.preparation.count(wanted, model, scope)
                client.finish()
                await send_json(send, 200, compact({"input_tokens": count}))
