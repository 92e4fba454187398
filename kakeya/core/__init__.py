"""Clock, errors, ids, units, tasks, log, files and facts of the host, for every floor. Nothing here
knows of models or fleets, and only the standard library is needed. Its files are one idea: the
vocabulary that all others share.
"""
