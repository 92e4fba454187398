"""Drafts from what the text itself repeats, at no cost of a model."""
