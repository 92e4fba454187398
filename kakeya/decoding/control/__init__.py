"""When drafting pays and how many tokens to draft, from measured acceptance and measured cost of a
row.
"""
