"""Settings: read from a file, the environment and the command line, checked once, and handed to
the part that each configures.
"""
