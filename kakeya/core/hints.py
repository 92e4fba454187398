"""Sentences that several floors say to the owner of a machine."""

from __future__ import annotations

INSTALL_OPENBLAS = "apt-get install libopenblas0-pthread"
"""The command that makes prefill fast on Debian and its relatives."""
