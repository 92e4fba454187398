"""The `kakeya` command: one verb a file, tables for people and JSON for programs. It talks to a
node and decides nothing. Its files are one idea: the command line.
"""
