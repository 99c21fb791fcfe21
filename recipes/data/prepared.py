"""Photographs in the shards of a prepared dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig
from recipes.data.description import read_manifest
from recipes.data.photographs import PhotoDataset
from recipes.data.shards import ShardReader


class ShardDataset(PhotoDataset):
    """What `FolderDataset` gives of the folder it was made from, in the same order.

    Opening checks sizes and the index; each image is checked when it is read.

    Raises:
        UserError: a file is missing, cut short or altered, naming it.
    """

    def __init__(self, config: DatasetConfig, root: Path, split: str, seed: int) -> None:
        manifest = read_manifest(root)
        self._reader = ShardReader(root, manifest, split)
        super().__init__(config, split, seed, self._reader.labels, manifest.classes)

    def content(self, index: int) -> memoryview | NDArray[np.uint8]:
        return self._reader.content(index)

    def path(self, index: int) -> str:
        return self._reader.place(index)

    def whereabouts(self, index: int) -> str:
        return self._reader.whereabouts(index)
