"""Who may be in memory: one owner of bytes. What is in use is never taken away."""
