"""The travel of views: rounds, digests and exchanges between two nodes. Lost, repeated or reordered
messages delay a view and never corrupt it.
"""
