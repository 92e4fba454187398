"""A fast BLAS under mlx's CPU backend, loaded before mlx is.

The Linux wheel of mlx links a reference BLAS. A library loaded earlier with global symbols takes
its place, and OpenBLAS makes float32 prefill 10-40 times faster. Nothing here imports mlx: it
must run first.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import re
import sys
from pathlib import Path

_UNCOPIED_CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")
_NAMES = ("libopenblas.so.0", "libopenblas.so")


_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHARED_WEIGHTS = 1 << 26
"""A model with fewer has products too short for several threads, which then wait for each other."""


def preload_blas(threads: int) -> bool:
    """Load OpenBLAS for everything that comes later; returns whether the CPU backend is fast.

    OpenBLAS uses `threads` until `use_threads`. True on macOS, where mlx uses Accelerate.
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


def threads_for(weights: int, cores: int | None = None) -> int:
    """The threads of OpenBLAS for a model with so many weights: all free cores, or one.

    It is the same at every start, because bits depend on it: a core is free if this process may
    use it, whatever else runs at the moment; one is left to the agent and the gateway.
    """
    cores = usable_cores() if cores is None else cores
    return max(1, cores - 1) if weights >= _SHARED_WEIGHTS else 1


def usable_cores(quota: Path = _CPU_QUOTA) -> int:
    """The cores that this process may use, by its affinity and its control group."""
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, int(allowed) // int(period)))
    except (OSError, ValueError):  # no control group, or one without a quota ("max")
        return cores


def use_threads(threads: int) -> None:
    """Let OpenBLAS use so many threads from now on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).openblas_set_num_threads(threads)


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
