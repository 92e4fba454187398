"""OpenAI's Responses: items in, items and their events out, and answers kept for the next turn."""
