"""Composition roots: the daemon, the engine's main, configuration and the command line."""
