"""One process of a pair: decodes with the other's drafts, and tells how that went as JSON.

mlx.launch -n 2 --backend ring -- python -m tests.mlx.diffusion.child_pair VERIFIER DRAFTER
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

from kakeya import SpeculativeDecoder, mlx_pair

PROMPT = [4 + 11 * place % 80 for place in range(40)]


def main() -> None:
    verifier_name, drafter_name = sys.argv[1:]
    with mlx_pair(verifier_name, drafter_name) as pair:
        if pair is None:
            print("drafted", flush=True)
            return
        verifier, proposer = pair
        from kakeya.generation.spec import parse_proposer, resolve
        from kakeya.mlx.diffusion.model import DiffusionModel

        tokens = list(PROMPT)
        for _ in range(40):
            tokens += verifier.verify(tokens, [])
        # The same drafts here, with the same states, tell that those arrive whole and in place.
        own = DiffusionModel(resolve(parse_proposer(drafter_name)), "own")
        differing, seconds = 0, []
        for length in (41, 44, 42, 60, 80):
            prefix = tokens[:length]
            verifier.verify(prefix, [])
            began = time.perf_counter()
            made = proposer.propose(prefix, 4, 2)
            seconds.append(time.perf_counter() - began)
            states = verifier.hidden_states(0, length - 1)
            assert states is not None
            assert states.end == length - 1
            differing += made.tokens != own.draft(prefix, 4, None, 0.0, 2, states).tokens
        found = {"differing": differing, "draft_ms": 1000 * median(seconds)}
        for size, steps in ((1, 1), (4, 1), (4, 4), (16, 3)):
            decoder = SpeculativeDecoder(
                verifier,
                proposer,
                context_tokens=verifier.context_tokens,
                block_size=size,
                num_diffusion_steps=steps,
            )
            made_tokens = list(decoder.generate(PROMPT, max_tokens=40))
            found[f"{size}/{steps}"] = {
                "is_equal": made_tokens == tokens[40:],
                "acceptance": decoder.stats.accepted / max(1, decoder.stats.verified),
                "problem": decoder.stats.first_failure,
            }
        found["sent_bytes"] = proposer.sent_bytes
        print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
