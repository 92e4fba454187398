"""The agent's side of decoding: sessions with token histories, and RuntimeService."""
