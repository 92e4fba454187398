"""Anthropic's Messages: requests in, answers and streams out, tokens counted."""
