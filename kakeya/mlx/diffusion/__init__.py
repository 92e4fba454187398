"""Drafts by block diffusion: a small network fills a block of masks in a few passes, all positions
at a time, after a prefix that it reads with or without the verifier's hidden states."""
