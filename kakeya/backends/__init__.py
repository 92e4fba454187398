"""How models are held and run: which models are resident, how they load and stop, and one
generation from its first attempt to its end.
"""
