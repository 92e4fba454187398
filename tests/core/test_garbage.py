"""What exists at the start is not visited by later collections; what comes later is collected."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
import kakeya.node.agent
from kakeya.core.garbage import spare_what_is_there

class Ring:
    def __init__(self):
        self.me = self

imported = len(gc.get_objects())
spared = spare_what_is_there()
assert spared >= 0.9 * imported > 10_000, (spared, imported)
left = len(gc.get_objects())
assert left < 0.05 * imported, (left, imported)
ring = weakref.ref(Ring())
assert ring() is not None
gc.collect()
assert ring() is None
"""


def test_imports_are_spared_and_new_garbage_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
