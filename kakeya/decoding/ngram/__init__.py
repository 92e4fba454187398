"""Drafts from repetitions in the text itself, at no cost of a model."""
