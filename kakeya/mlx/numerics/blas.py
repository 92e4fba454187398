"""A fast BLAS under mlx's CPU backend, loaded before mlx is.

The Linux wheel of mlx links a reference BLAS. A library loaded earlier with global symbols takes
its place, and OpenBLAS makes float32 prefill 10-40 times faster. Nothing here imports mlx: it
must run first.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys

_UNCOPIED_CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")
_NAMES = ("libopenblas.so.0", "libopenblas.so")


def preload_blas(threads: int) -> bool:
    """Load OpenBLAS for everything that comes later; returns whether the CPU backend is fast.

    OpenBLAS uses `threads`; one is best for small models, with products too short to share. True
    on macOS, where mlx uses Accelerate.
    """
    if sys.platform == "darwin":
        return True
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    if "mlx.core" in sys.modules:
        return False
    for name in (*_NAMES, ctypes.util.find_library("openblas")):
        if name is None:
            continue
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def blas_name() -> str:
    """Which OpenBLAS is under mlx now, its kernels and threads; "" = none, Accelerate on macOS.

    Its arithmetic differs from processor to processor, and with the number of threads.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        library = ctypes.CDLL(None)
        describe = library.openblas_get_config
        threads = int(library.openblas_get_num_threads())
    except (OSError, AttributeError):
        return ""
    describe.restype = ctypes.c_char_p
    return f"{describe().decode(errors='replace').strip()}, {threads} threads"


def is_strip_faster() -> bool:
    """Whether products are faster in strips (see `openblas`).

    OpenBLAS has kernels that copy nothing for AVX-512 since 0.3.17, and uses one thread for them.
    """
    found = re.match(r"OpenBLAS (\d+)\.(\d+)\.(\d+)\S* .*?, (\d+) threads", blas_name())
    if found is None:
        return False
    *version, threads = map(int, found.groups())
    has_kernels = any(core in blas_name() for core in _UNCOPIED_CORES)
    return has_kernels and version >= [0, 3, 17] and threads == 1


def is_openblas() -> bool:
    """Whether mlx's products on the CPU are OpenBLAS's."""
    return sys.platform != "darwin" and bool(blas_name())
