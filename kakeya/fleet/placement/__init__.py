"""Which node verifies and which nodes draft: a pure function of a snapshot, with the numbers on
which the plan was decided.
"""
