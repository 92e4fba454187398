"""The machine's shortage of memory, by the operating system, and its panics."""
