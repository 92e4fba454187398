"""Which worker runs which file of tests, when `pytest -n` has several.

A file stays with one worker, which keeps the nodes and engines that its tests share. Two things of
xdist's own scheduler of files end a run without an end once a worker has died: it hands out the
test that ended the worker again, and it leaves a worker with one test, which a worker begins only
when it hears of another one or that there is none.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LONG = ("tests/node/", "tests/fleet/", "tests/wire/", "tests/backends/", "tests/doctor/")
"""Folders of nodes, engines and networks, whose files take longest. They come first: one that began
last would go on beside idle workers."""


class FileScheduling(LoadFileScheduling):
    """Files in the order of collection, whatever becomes of a worker."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out again what a worker had yet to run, but for the test that it ran: returned."""
        work = self.assigned_work.pop(node)
        left = [
            (file, test) for file in work for test, is_done in work[file].items() if not is_done
        ]
        if not left:
            return None
        file, crashed = left[0]
        work[file][crashed] = True
        self.workqueue.update({name: work[name] for name, _ in left[1:]})
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    return FileScheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
