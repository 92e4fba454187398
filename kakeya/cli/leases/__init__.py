"""`kakeya lease`: memory for programs outside of Kakeya, taken and kept while a command runs."""
