"""Measures a model of a node as a client does, by requests of low priority over HTTP.

What is compared runs in turns, in the same minutes: with drafts, without them, and again. Prompts
begin with words that were never sent before, so that no cache knows them. A prompt goes with drafts
first: the node learns from answers, and knows that one afterwards.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from kakeya.cli.node_api import NodeApi
from kakeya.core.errors import KakeyaError

LEAST_TOKENS = 8
"""An answer that its model ended sooner tells no speed."""
_WORDS = (
    *("river", "stone", "copper", "window", "garden", "seven", "quiet", "engine", "letter"),
    *("orange", "harbour", "paper", "mountain", "silver", "winter", "bread", "candle", "forest"),
    *("bridge", "morning", "circle", "butter", "tower", "yellow", "market", "ocean", "pencil"),
)
_CALIBRATION_WORDS = 40
_COSTS_S = 60
"""Seconds that a model gets to be measured; an engine at rest tells it after 15 and 45."""
_COPIED_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure. `rounds` are those that medians are taken of; `tokens` those of an answer;
    `clients` ask at once; the long prompt has about `prompt_tokens`, at most."""

    model: str
    rounds: int
    tokens: int
    clients: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One answer. Times are seconds of one clock; `usage` is the node's account."""

    began: float
    first: float
    ended: float
    text: str
    request_id: str
    usage: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def own(self) -> Mapping[str, Any]:
        """What only a Kakeya engine tells; {} of others."""
        return self.usage.get("kakeya") or {}

    @property
    def decode_s(self) -> float:
        """The engine's time behind the prompt: the client's own shows a burst of tokens that it
        read late."""
        told_s = (self.own.get("total_ms", 0) - self.own.get("prefill_ms", 0)) / 1000
        return float(told_s) if told_s > 0 else max(1e-9, self.ended - self.first)


@dataclass(slots=True)
class BenchSamples:
    """What was measured so far, by name, and what may have spoilt it, a sentence each."""

    values: dict[str, list[float]] = field(default_factory=dict)
    spoilt: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Take one more value of a name."""
        self.values.setdefault(name, []).append(value)

    def spoil(self, sentence: str) -> None:
        """Note that something disturbed the work; equal ones are counted."""
        self.spoilt[sentence] = self.spoilt.get(sentence, 0) + 1


class NodeBench:
    """Measures one model; `samples` grow with each step."""

    def __init__(
        self,
        node: NodeApi,
        plan: BenchPlan,
        rng: random.Random,
        *,
        node_id: str = "",
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.samples = BenchSamples()
        self._node = node
        self._plan = plan
        self._rng = rng
        self._node_id = node_id
        self._clock = clock
        self._pause = pause
        self._tokens_per_word = 1.0

    def steps(self, on_wait: Callable[[str], None]) -> Iterator[str]:
        """Do all of the work; names each step before it begins. Raises KakeyaError."""
        yield "warm-up"
        first = self._answer(self._words(_CALIBRATION_WORDS), "off", tokens=2, on_wait=on_wait)
        self._tokens_per_word = max(0.5, first.prompt_tokens / _CALIBRATION_WORDS)
        self._answer(self._words(_CALIBRATION_WORDS), "auto", tokens=self._plan.tokens)
        long = self._plan.prompt_tokens
        for turn in range(1, self._plan.rounds + 1):
            of = f"round {turn} of {self._plan.rounds}: "
            yield of + "one request"
            self._pair("decode", self._words(40), turn)
            yield of + "a text that repeats itself"
            self._pair("copy", " ".join([self._words(_COPIED_WORDS)] * 3), turn)
            yield of + f"{self._plan.clients} requests at once"
            for policy, name in (("auto", "drafts"), ("off", "plain")):
                self._at_once(policy, f"at_once_{name}", turn)
            yield of + f"prompts of {long // 8} and {long} tokens"
            self._prompt("short", long // 8)
            self._prompt("long", long)
        yield "the costs of verifying, which an engine measures while it is idle"
        self._wait_for_costs()

    def _pair(self, name: str, prompt: str, seed: int) -> None:
        """One prompt with drafts and without."""
        texts = []
        for policy, kind in (("auto", "drafts"), ("off", "plain")):
            self._look_for_others()
            sampled = 1.0 if name == "decode" else 0.0  # the likeliest words soon go in circles
            answer = self._answer(prompt, policy, temperature=sampled, seed=seed)
            texts.append(answer.text)
            if self._is_short(answer):
                return
            self.samples.add(f"{name}_{kind}", (answer.tokens - 1) / answer.decode_s)
            if kind == "drafts" and answer.own.get("verified"):
                accepted = answer.own["accepted"] / answer.own["verified"]
                self.samples.add(f"{name}_accepted", accepted)
        self.samples.add(f"{name}_equal", float(texts[0] == texts[1]))

    def _is_short(self, answer: TimedAnswer) -> bool:
        if answer.tokens < LEAST_TOKENS:
            self.samples.spoil(f"an answer had less than {LEAST_TOKENS} tokens, and is left out")
        return answer.tokens < LEAST_TOKENS

    def _prompt(self, name: str, tokens: int) -> None:
        """A prompt that no cache knows, and then again."""
        self._look_for_others()
        prompt = self._words(int(tokens / self._tokens_per_word))
        cold = self._answer(prompt, "off", tokens=1)
        took_s = cold.own.get("prefill_ms", 0) / 1000 or cold.first - cold.began
        self.samples.add(f"prompt_{name}", cold.prompt_tokens / max(1e-9, took_s))
        self.samples.add(f"first_{name}", cold.first - cold.began)
        if name == "long":
            warm = self._answer(prompt, "off", tokens=1)
            self.samples.add("first_warm", warm.first - warm.began)

    def _at_once(self, policy: str, name: str, seed: int) -> None:
        self._look_for_others()
        done: queue.SimpleQueue[TimedAnswer | KakeyaError] = queue.SimpleQueue()

        def ask(prompt: str) -> None:
            try:
                done.put(self._answer(prompt, policy, temperature=1.0, seed=seed))
            except KakeyaError as failure:
                done.put(failure)

        prompts = [self._words(40) for _ in range(self._plan.clients)]
        for prompt in prompts:  # daemons: Ctrl-C does not wait for them
            threading.Thread(target=ask, args=(prompt,), daemon=True).start()
        answers = []
        for _ in prompts:
            answer = done.get()
            if isinstance(answer, KakeyaError):
                raise answer
            answers.append(answer)
        if any(self._is_short(one) for one in answers):
            return
        tokens = sum(one.tokens - 1 for one in answers)
        heard_s = max(one.ended for one in answers) - min(one.first for one in answers)
        self.samples.add(name, tokens / max(heard_s, *(one.decode_s for one in answers)))

    def _answer(
        self,
        prompt: str,
        policy: str,
        *,
        tokens: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> TimedAnswer:
        body = {
            "model": self._plan.model,
            "prompt": prompt,
            "max_tokens": tokens or self._plan.tokens,
            "temperature": temperature,
            "seed": seed,
            "draft_policy": policy,
            "priority": "batch",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, pieces = self._clock(), 0.0, []
        last: dict[str, Any] = {}
        for event in self._node.stream("/v1/completions", body, on_wait):
            choices: Any = event.get("choices")
            if choices and not first:
                first = self._clock()
            pieces += [str(one.get("text") or "") for one in choices or ()]
            last |= {name: event[name] for name in ("id", "usage") if event.get(name)}
        ended = self._clock()
        answer = TimedAnswer(
            began=began,
            first=first or ended,
            ended=ended,
            text="".join(pieces),
            request_id=str(last.get("id")),
            usage=last.get("usage") or {},
        )
        self._look_where(answer)
        return answer

    def _look_where(self, answer: TimedAnswer) -> None:
        """Note an answer of another node, which has the model, too."""
        try:
            found = self._node.get(f"/api/v1/requests/{quote(answer.request_id, safe='')}")
        except KakeyaError:
            return
        routes = found.get("routes")
        if isinstance(routes, list) and routes and routes[-1].get("node") != self._node_id:
            self.samples.spoil("an answer came from another node that has the model")

    def _wait_for_costs(self) -> None:
        for _ in range(_COSTS_S):
            model: Mapping[str, Any] = next(
                (one for one in self._models() if one["model_id"] == self._plan.model), {}
            )
            if model.get("verify_ms") or not model.get("device"):  # no engine has it
                return
            self._pause(1.0)

    def _models(self) -> Any:  # noqa: ANN401 - JSON
        return self._node.get("/api/v1/status").get("models") or ()

    def _look_for_others(self) -> None:
        """Note requests that are not ours: none of ours runs between two steps."""
        if any(one.get("running") or one.get("waiting") for one in self._models()):
            self.samples.spoil("others' requests ran at the node")

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(max(1, count)))
