"""Steps of the engine: prefill, draft, verify and commit, for every sequence that runs."""
