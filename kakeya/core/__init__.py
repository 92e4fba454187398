"""Clock, errors, ids, units, tasks, log: what every floor may use; standard library only."""
