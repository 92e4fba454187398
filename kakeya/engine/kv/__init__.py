"""KV of the sequences in an engine: blocks that come and go, slots, and sequences that are parked
to let others run.
"""
