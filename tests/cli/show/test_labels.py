"""Labels in the place of ids that keys make."""

from __future__ import annotations

from kakeya.cli.show.labels import NodeLabels, labels_in

LONG, OTHER = "zjahxbwvztnbqh3fyfcxdcwlrlbol6v3ckpowxk4ztr2e2lwffcq", "a" * 52


def test_labels_stand_for_ids_and_unknown_ones_are_short() -> None:
    labels = labels_in([{"node_id": LONG, "label": "mini-1"}, {"node_id": "vm-1", "label": ""}, 7])
    assert [labels.of(one) for one in (LONG, OTHER, "vm-1")] == ["mini-1", "aaaaaaaa", "vm-1"]
    text = f"{LONG} gave way to {OTHER}; `kakeya doctor {LONG}`; {LONG}x"
    assert labels.within(text) == (f"mini-1 gave way to aaaaaaaa; `kakeya doctor mini-1`; {LONG}x")
    assert NodeLabels().within(LONG) == "zjahxbwv"


def test_nodes_of_one_label_are_told_apart() -> None:
    labels = NodeLabels({LONG: "mini", OTHER: "mini", "vm-1": "vm"})
    assert [labels.apart(one) for one in (LONG, OTHER, "vm-1")] == [
        "mini (zjahxbwv)",
        "mini (aaaaaaaa)",
        "vm",
    ]
