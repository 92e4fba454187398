"""Generated stubs of proto/kakeya/v1; made by scripts/gen, never edited."""
