"""Speculative decoding for programs that bring a verifier of their own."""
