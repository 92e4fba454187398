"""Tools of a model: how they are shown where a template shows none, how calls of them are written
and read, and how an answer is parted into text, thoughts and calls."""
