"""The choice of the verifying and the drafting nodes: a pure function of a snapshot, with the
numbers on which the plan was decided.
"""
