"""Sessions with token histories over gRPC, and their Python client. A history outlives the engine
that computed it.
"""
