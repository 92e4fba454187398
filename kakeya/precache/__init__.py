"""What to compute ahead, and where the KV of prefixes lives: in pages, on disk, at peers."""
