"""The files of models: what lies on this disk, and what is fetched from peers or from the hub."""
