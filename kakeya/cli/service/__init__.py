"""The life of a node's process: `kakeya drain`, `restart`, `update`, and `service`, by which the
system starts the node with the machine and again whenever it ends.
"""
