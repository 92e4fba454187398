"""macOS, played on Linux for a Python process and its children.

    PYTHONPATH=tests/as_mac:. python ...     or: scripts/test --as-mac [ARGUMENTS OF PYTEST]

`sitecustomize` is imported by each Python that starts, before any program. `mac` then gives it the
platform's name, takes away what a Python on macOS lacks, answers the calls of `core.darwin` with
facts of this machine (through tests/darwin_library.py), and runs the files of programs/ where a
program of macOS is started. Branches on the platform run so; macOS itself, its numbers, Metal,
Accelerate and launchd do not.
"""
