"""Relays: whole requests handed on to what is no engine of this node, as a cloud or a program, and
the parts of its answers handed back."""
