"""Where blocks lie in the page pool, and the pins that keep them there while they are read."""
