"""One owner of the machine's bytes. Nothing large loads without a lease in its ledger, and what is
in use is never taken away.
"""
