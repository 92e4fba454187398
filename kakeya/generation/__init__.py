"""The contract between the agent and its engines: a request, the frames that answer it, the facts
of a model and what its owner says of it, and their form on the wire. These files are one idea: each
part is spelled once, here, and both processes import it.
"""
