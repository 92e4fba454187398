"""HTTP: requests in the dialects of agents, streamed answers, errors that name the parameter. Its
files are one idea: the way of a request from its body to its answer, and what is told of it.
"""
