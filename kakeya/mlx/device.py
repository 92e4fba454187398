"""The device under mlx: its limit, a limit that must never be set, and faults that end the engine.

Metal computes in command buffers. After one that failed (memory, time, a fault of the GPU), mlx
raises once, from whichever call comes next, of whichever sequence, and goes on; arrays of that
buffer count as computed. Which KV is wrong cannot be told then, so none of the process is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import mlx.core as mx

from kakeya.engine.model import DeviceLost

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")
_Class = TypeVar("_Class")
_FAILED = "[METAL] Command buffer execution failed"
_LIMIT = "max_recommended_working_set_size"


def working_set_bytes() -> int:
    """The bytes that Metal lets this process keep wired; 0 = no GPU computes here."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return 0
    return int(mx.device_info().get(_LIMIT, 0))


def forbid_wired_limit() -> None:
    """Have each call that sets how much Metal keeps wired fail, those of mlx-lm's helpers too:
    too high a limit panics the machine."""
    mx.set_wired_limit = _refuse


def ends_with_device(owner: type[_Class]) -> type[_Class]:
    """Make the public methods of a class raise DeviceLost for a failed command buffer."""
    for name, method in vars(owner).copy().items():
        if callable(method) and not name.startswith("_"):
            setattr(owner, name, tells_lost_device(method))
    return owner


def tells_lost_device(function: Callable[_Given, _Answer]) -> Callable[_Given, _Answer]:
    """Make a function, or each step of a generator, raise DeviceLost for a failed command buffer:
    where its faults are caught as those of a model, it has to be told first."""

    @wraps(function)
    def told(*given: _Given.args, **named: _Given.kwargs) -> _Answer:
        try:
            return function(*given, **named)
        except RuntimeError as failure:
            _tell(failure)
            raise

    @wraps(function)
    def steps(*given: _Given.args, **named: _Given.kwargs) -> Generator[Any, None, Any]:
        try:
            return (yield from cast("Generator[Any, None, Any]", function(*given, **named)))
        except RuntimeError as failure:
            _tell(failure)
            raise

    is_generator = inspect.isgeneratorfunction(function)
    return cast("Callable[_Given, _Answer]", steps if is_generator else told)


class PeakMeter:
    """Measures the most memory that work takes on top of what is held when it begins.

    mlx has one peak for the process, which begins anew with each measurement, so that of the
    process's life is kept here.
    """

    def __init__(self) -> None:
        self._before_bytes = 0

    @property
    def process_peak_bytes(self) -> int:
        """The most that mlx ever held."""
        return max(self._before_bytes, int(mx.get_peak_memory()))

    @contextmanager
    def measure(self) -> Generator[Measured, None, None]:
        """Measure work that is evaluated within; `peak_bytes` is there afterwards."""
        self._before_bytes = self.process_peak_bytes
        mx.reset_peak_memory()
        held, measured = mx.get_active_memory(), Measured()
        yield measured
        measured.peak_bytes = max(0, mx.get_peak_memory() - held)


@dataclass(slots=True)
class Measured:
    """A measurement of a PeakMeter."""

    peak_bytes: int = 0


def _tell(failure: RuntimeError) -> None:
    if _FAILED in str(failure):
        raise DeviceLost(str(failure)) from failure


def _refuse(limit: int) -> NoReturn:
    raise RuntimeError(
        f"a wired limit of {limit} bytes was to be set: it is left to the system, since too high a "
        "limit panics the machine"
    )
