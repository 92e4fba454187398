"""Speculative decoding: drafts change speed, never output."""
