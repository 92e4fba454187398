"""A short `kakeya demo`, which `test_demo.py` runs."""

from __future__ import annotations

import sys

from kakeya.cli import demo

if __name__ == "__main__":
    demo.ROUNDS, demo.PROMPT_TOKENS, demo.NEW_TOKENS = 1, 128, 24
    sys.exit(demo.run_demo(as_json=True))
