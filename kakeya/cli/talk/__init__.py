"""`kakeya generate` and `kakeya chat`: one answer, or one after another, streamed to a terminal."""
