"""The queue of an engine: which generation enters next, and the room that it needs."""
