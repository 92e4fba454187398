"""How short of memory the machine is, by the operating system, and how often it panicked."""
