"""The `kakeya` command: one verb a file, tables for people and JSON for programs. A command talks
to a node and decides nothing itself. Its files are one idea: the verbs of a person at a shell.
"""
