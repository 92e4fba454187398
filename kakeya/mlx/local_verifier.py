"""A model as the verifier of a program's own `SpeculativeDecoder`."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.request import Sampling
from kakeya.mlx.kept_prefix import KeptPrefix
from kakeya.mlx.loader import LoadedModel

_PREFILL_TOKENS = 512
"""Of one forward; it bounds the activations of a long prompt."""


class LocalVerifier:
    """Implements `Verifier`: a draft is verified in one forward, and its KV rolled back.

    State that cannot be rolled back (recurrent, or beyond a sliding window) takes the tokens one by
    one, up to the first wrong one: as plain decoding, no faster. Belongs to the thread that made
    it, as mlx's streams do.
    """

    def __init__(self, model: LoadedModel, sampling: Sampling) -> None:
        self._model = model
        self._kept = KeptPrefix(model, _PREFILL_TOKENS)
        self._kept.state.select_with(sampling)
        self.vocab_size = model.vocab_size()
        """How many ids it has a logit for."""

    @property
    def context_tokens(self) -> int:
        """The most tokens of a prompt and its continuation."""
        return self._model.context_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return frozenset(self._model.eos_token_ids)

    @property
    def tokenizer_file(self) -> str:
        """The path of the model's tokenizer.json."""
        return str(self._model.path / "tokenizer.json")

    def hidden_states(self, first: int, end: int) -> HiddenStates | None:
        """Those of the tokens `first` to `end` of the newest text, the newest that there are; None
        = none. Of a verifier that keeps them for a drafter."""
        return self._kept.state.hidden_states(first, end)

    @property
    def vocabulary_digest(self) -> str:
        """Equal where token ids mean the same text; "" = not known."""
        return self._model.vocabulary_digest

    def verify(self, history: Sequence[int], draft: Sequence[int]) -> list[int]:
        """The model's own next token after `history + draft[:i]`, for i = 0..len(draft).

        What stands behind a wrong token of the draft need not be computed, and may be any token.
        """
        kept = self._kept
        kept.follow(history)
        rows = [history[-1], *draft]
        with kept.changing():
            if len(rows) <= kept.state.verifiable_rows():
                kept.tokens += rows
                return kept.state.verify(rows)
            selected: list[int] = []
            for row in rows:
                if selected and selected[-1] != row:
                    break
                kept.tokens.append(row)
                selected += kept.state.verify([row])
        return selected + selected[-1:] * (len(rows) - len(selected))
