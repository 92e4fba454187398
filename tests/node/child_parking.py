"""The real main of the engine child, which waits a minute for pages for the KV of parked sequences.

Its flags are those of the engine child.
"""

from __future__ import annotations

from kakeya.engine.kv import parking
from kakeya.node.engine_main import main

if __name__ == "__main__":
    parking.PAGES_S = 60.0
    main()
