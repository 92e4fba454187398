"""KV of one sequence, layer by layer, to and from blocks."""
