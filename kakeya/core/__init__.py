"""Clock, errors, ids, units, tasks, log, files and the host: what every floor may use. It knows
nothing of models or fleets, and needs the standard library only.
"""
