"""Control of a ring group: what its ranks run next, and whether all of them live. No tensors."""
