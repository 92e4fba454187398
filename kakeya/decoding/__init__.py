"""Proposers, acceptance, sampling, controller, decoder: drafts change speed, never output."""
