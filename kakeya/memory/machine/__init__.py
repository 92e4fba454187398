"""How short of memory the machine is, read from the operating system, and how often it panicked."""
