"""Processes of the tests that import mlx-lm start sooner.

mlx-lm imports transformers, which reads the sources of all its architectures, twice, to learn which
names they offer: more processor time than all else in the start of an engine. `scripts/test` puts
this folder first on PYTHONPATH; each Python that starts then imports `sitecustomize`, which keeps
what was read in a file of the virtual environment, for this installation of transformers. Nothing
else of a process changes, and without the folder it starts as it does elsewhere.
"""
