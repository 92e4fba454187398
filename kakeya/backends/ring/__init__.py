"""Ring groups: a model over several nodes, which their agents start, keep and end. To the node of
rank 0, and so to all clients, the group is one engine; `groups` tells its life. All files are of
one idea, the group: its members, its ranks, its weights, and its canary, which shows that its sums
are right.
"""
