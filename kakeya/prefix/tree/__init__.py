"""Which blocks this node holds, as a tree of prefixes, and which of them to evict first. Pure."""
