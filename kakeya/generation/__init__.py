"""The contract between the agent and its engines: a request, the frames that answer it, the facts
of a model, and their form on the wire. Each is spelled once, here, and both processes import
it.
"""
