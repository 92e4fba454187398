"""Settings of the models on disk, and of their fetch from peers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakeya.core.settings import folder, megabytes, number, setting, switch

MODELS = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """Where models lie, how much disk they take, and how fast they come."""

    folder: Path | None = setting(
        "the folder of models that were pulled (models/ in the data directory)", folder, None
    )
    disk_bytes: int = setting(
        "the most disk for models that were pulled: those that were not used for longest go; 0: "
        "no bound",
        megabytes(0, 1024 * 1024 * 1024),
        0,
    )
    pull_mb_per_s: float = setting(
        "the most MB/s with which models are pulled from peers; 0: no bound",
        number(0, 1_000_000, "MB/s"),
        0.0,
    )
    serve: bool = setting(
        "models that were pulled are served by their names, and loaded for requests (true)",
        switch,
        True,
    )
    pull_on_demand: bool = setting(
        "a request for a model that no node can serve now may pull it from a peer that has it on "
        "its disk (true)",
        switch,
        True,
    )
    peers: bool = setting("peers may fetch this node's models (true)", switch, True)

    def models_folder(self, data_dir: Path) -> Path:
        """The folder of models that were pulled."""
        return self.folder or data_dir / MODELS
