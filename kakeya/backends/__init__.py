"""How models are held and run: which models are resident, how they load and stop, and one
generation from its first attempt to its end. Its files are one idea: the way of a request to the
engine of its model.
"""
