"""The ledger, the queue of loads, and the plans that evict, load or refuse. Decisions are pure;
only the keeper and the runner perform them. Its files are one idea: the life of a resident,
from the request for bytes to their return.
"""
