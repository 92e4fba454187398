"""Memory lent to other processes, such as training jobs: rules, stores in SQLite and Redis, and
the watch over the process that holds a lease. A dead process returns its bytes.
"""
