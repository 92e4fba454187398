"""What the engine computes next: prefill, draft, verify, commit, for every sequence that runs."""
