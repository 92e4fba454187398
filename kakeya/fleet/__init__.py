"""Cards, the registry, gossip, placement: who is there and who does what. Decisions are pure."""
