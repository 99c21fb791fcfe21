"""The table of launches: small trainings that `test_launches.py` starts and checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A backbone of 0.2 million parameters without dropout; at this learning rate the float64 losses
# of four steps agree over topologies within 1e-11. At 0.1 batch normalisation of channels that
# are nearly constant amplifies rounding a hundredfold each step.
SMALL = (
    "model=MobileNetV1_x0_25",
    "optimizer.base_lr=0.002",
    "batch_size=null",
    "global_batch_size=48",
    "log.every=1",
)
EXACT = (*SMALL, "dtype=float64", "max_steps=4")
SYNTHETIC = (
    "dataset=synthetic",
    "dataset.num_classes=10",
    "dataset.train_size=32",
    "dataset.eval_size=7",
)
RESNET = (
    *SYNTHETIC,
    "dataset.image_size=16",
    "model=resnet18",
    "optimizer.base_lr=0.002",
    "batch_size=null",
    "global_batch_size=16",
    "log.every=1",
    "dtype=float64",
    "sync_bn=true",
)
DROPOUT = (*SMALL, "model.name=MobileNetV3_small_x1_0", "max_steps=3")
SCORE = (*SMALL, "dtype=float64", "task=evaluate", "checkpoint={sync_1x2}/checkpoints/best")


@dataclass(frozen=True)
class Row:
    """One launch, and what its run folder must show.

    Attributes:
        overrides: ``{photographs}`` stands for the folder that the tests make, ``{prepared}`` for
            the prepared dataset of it, ``{NAME}`` for the run folder of the row NAME.
        devices: ranks, all on this node.
        steps: optimizer steps, each of them logged.
        samples: held-out images that count.
        epochs: evaluations.
        top5: whether there are classes enough for a top-5 score.
        says: patterns that some rank's log has.
        bare: started by ``python -m paddle.distributed.launch`` and not by ``train.py``.
    """

    name: str
    overrides: tuple[str, ...]
    devices: int = 1
    steps: int = 4
    samples: int = 360
    epochs: int = 1
    top5: bool = True
    says: tuple[str, ...] = ()
    bare: bool = False

    @property
    def task(self) -> str:
        """``train`` or ``evaluate``."""
        return "evaluate" if "task=evaluate" in self.overrides else "train"

    @property
    def needs(self) -> list[str]:
        """The rows whose run folders this one reads."""
        names = re.findall(r"\{(\w+)\}", " ".join(self.overrides))
        return [name for name in names if name not in ("photographs", "prepared")]


TABLE = (
    # One global batch on any topology: the same training.
    Row("sync_1x1", (*EXACT, "sync_bn=true"), 1),
    Row("sync_1x2", (*EXACT, "sync_bn=true"), 2),
    Row("sync_1x3", (*EXACT, "sync_bn=true"), 3),
    Row("sync_1x4", (*EXACT, "sync_bn=true"), 4),
    Row("bare_1x2", (*EXACT, "sync_bn=true"), 2, bare=True),
    # Batch statistics of each share: k ranks are one process that accumulates k shares.
    Row("shares_1x1", (*EXACT, "accumulate=4"), 1),
    Row("shares_1x2", (*EXACT, "accumulate=2"), 2),
    Row("shares_1x4", EXACT, 4),
    # The same training by other means.
    Row(
        "lean",
        (
            *(*EXACT, "accumulate=2", "compile=true"),
            *("gradients.bucket_mib=1", "affinity=split"),
        ),
        2,
    ),
    Row("rounded", (*EXACT, "dtype=float32", "gradients.dtype=bfloat16"), 4),
    Row("averaged", (*EXACT, "max_steps=1"), 2, steps=1),
    # A checkpoint of two ranks, scored by others.
    Row("score_1x1", SCORE, 1, steps=0),
    Row("score_1x3", SCORE, 3, steps=0),
    Row("score_1x4", SCORE, 4, steps=0),
    # Choices.
    Row(
        "adamw_step",
        (*SMALL, "max_steps=5", "optimizer=adamw", "schedule=step", "schedule.milestones=[0.1]"),
        1,
        steps=5,
    ),
    Row(
        "smoothing_clip",
        (
            *(*EXACT, "sync_bn=true", "max_steps=1", "label_smoothing=0.1"),
            *("optimizer.clip_norm=0.01", "optimizer.weight_decay=0"),
        ),
        2,
        steps=1,
    ),
    Row("dropout", (*DROPOUT, "seed=1"), 1, steps=3),
    Row("resnet_nchw", RESNET, 1, steps=2, samples=7),
    Row("resnet_nhwc", (*RESNET, "model.data_format=NHWC"), 2, steps=2, samples=7),
    Row(
        "workers",
        (
            *(*SMALL, *SYNTHETIC, "dataset.workers=2", "dataset.image_size=32"),
            *("global_batch_size=16", "epochs=2"),
        ),
        2,
        samples=7,
        epochs=2,
    ),
    Row(
        "prepared",
        (
            *(*SMALL, "dataset=imagenet", "dataset.path={prepared}", "dataset.image_size=32"),
            *("global_batch_size=8", "max_steps=2"),
        ),
        2,
        steps=2,
        samples=5,
        top5=False,
    ),
    Row(
        "photographs",
        (
            *(*SMALL, "dataset=imagenet", "dataset.path={photographs}", "dataset.image_size=32"),
            *("dataset.workers=0", "dataset.on_corrupt=skip", "global_batch_size=8"),
        ),
        2,
        steps=3,
        samples=5,
        top5=False,
        says=(
            r"warning: replaced \S+/train/newt/2\.png: cannot be read",
            r"warning: skipped \S+/val/toad/1\.jpg: cannot be read",
        ),
    ),
)
ROWS = {row.name: row for row in TABLE}
