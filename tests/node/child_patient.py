"""The daemon of a node that gives its peers and its running calls a minute, where a machine that
tests keep busy needs more than moments. Flags are the daemon's."""

from __future__ import annotations

from kakeya.fleet.liveness import duplicate_id
from kakeya.node import agent, daemon

if __name__ == "__main__":
    agent.GRACE_S = agent._FAREWELL_S = 60.0
    duplicate_id._ASK_S = duplicate_id._LIMIT_S = 60.0
    daemon.main()
