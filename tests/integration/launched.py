"""The launches of the table, each made once, and the images that some of them read."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL.Image
from launches import ROWS, Row
from running import Finished, launch

AT_ONCE = 2  # launches side by side: a small one keeps hardly more than one core busy


class Launches:
    """Run folders by row, made when they are asked for or expected."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photographs = make_photographs(root / "images")
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._futures: dict[str, Future[Finished]] = {}

    def folder(self, name: str) -> Path:
        """The run folder of a row."""
        return self.root / name

    def expect(self, names: list[str]) -> None:
        """Begin these rows, those that others read from first."""
        for name in sorted(names, key=lambda name: len(ROWS[name].needs)):
            if name not in self._futures:
                self.expect(ROWS[name].needs)
                needed = [self._futures[need] for need in ROWS[name].needs]
                self._futures[name] = self._pool.submit(self._launch, ROWS[name], needed)

    def __getitem__(self, name: str) -> Finished:
        self.expect([name])
        return self._futures[name].result()

    def close(self) -> None:
        """Forget what has not begun, and wait for what has."""
        self._pool.shutdown(cancel_futures=True)

    def _launch(self, row: Row, needed: list[Future[Finished]]) -> Finished:
        # Those were submitted earlier, so they run or have run: waiting here cannot block them.
        for need in needed:
            assert need.result().status == 0, need.result().said
        folders = {need: self.folder(need) for need in row.needs}
        if "dataset.path={prepared}" in row.overrides:
            folders["prepared"] = self._prepare()
        given = [each.format(photographs=self.photographs, **folders) for each in row.overrides]
        launcher: list[str] = []
        if row.bare:
            launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(row.devices)]
            launcher += ["--log_dir", str(self.root / f"{row.name}-launcher")]
        return launch(self.folder(row.name), f"topology=1x{row.devices}", *given, launcher=launcher)

    def _prepare(self) -> Path:
        """The photographs as a prepared dataset; no rank and no Paddle takes part in making it."""
        output = self.root / "prepared-images"
        done = launch(
            self.root / "prepare",
            *("task=prepare", "dataset=imagenet", f"dataset.path={self.photographs}"),
            *("dataset.on_corrupt=skip", f"prepare.output={output}"),
        )
        assert done.status == 0, done.said
        assert "23 train and 5 eval images" in done.said
        assert "2 left out" in done.said
        return output


def make_photographs(root: Path) -> Path:
    """Three classes of eight training and two held-out images, PNG and JPEG.

    ``train/newt/2.png`` and ``val/toad/1.jpg`` cannot be decoded.
    """
    rng = np.random.default_rng(0)
    for split, each in (("train", 8), ("val", 2)):
        for name in ("frog", "newt", "toad"):
            (root / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
                suffix = "jpg" if number % 2 else "png"
                PIL.Image.fromarray(pixels).save(root / split / name / f"{number}.{suffix}")
    (root / "train" / "newt" / "2.png").write_bytes(b"not an image")
    whole = (root / "val" / "toad" / "1.jpg").read_bytes()
    (root / "val" / "toad" / "1.jpg").write_bytes(whole[:40])
    return root
