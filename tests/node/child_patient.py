"""The daemon of a node that, told to stop, lets running calls go on for a minute. Flags are the
daemon's."""

from __future__ import annotations

from kakeya.node import agent, daemon

if __name__ == "__main__":
    agent.GRACE_S = 60.0
    daemon.main()
