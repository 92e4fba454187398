"""Streams with an address: after the loss of the node that began one, any node tells its rest."""
