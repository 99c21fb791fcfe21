"""Training sums that stay on the device until a logging step reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import paddle

from recipes import distributed
from recipes.config import UserError
from recipes.topology import Place

_KEPT = 256  # steps, whose small tensors are kept at most


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite; going on would only spread it."""


@dataclass(frozen=True)
class Reading:
    """What the meter saw, over all ranks.

    Attributes:
        loss: the mean over the last step's global batch.
        top1: the share of right answers since the reading before, a fraction.
        skipped_steps: optimizer steps that AMP's scaler has skipped so far.
    """

    loss: float
    top1: float
    skipped_steps: int


class Meter:
    """Adds up loss and hits without waiting for the device.

    Args:
        since_event: what a run that is continued had counted, see `since_event`.

    What a step leaves is only kept, and added up for many steps at once: a kernel a step and number
    would cost a small model's step a hundredth of its time. The step at which a rank's loss was not
    finite first is found that way as well, so a run stops at the next reading with its number.
    """

    def __init__(self, place: Place, since_event: tuple[float, int] = (0.0, 0)) -> None:
        self._place = place
        self._shares: list[paddle.Tensor] = []  # since the last fold, of every micro-batch
        self._right: list[paddle.Tensor] = []
        self._found_inf: list[paddle.Tensor] = []
        self._steps: list[int] = []
        self._loss = self._hits = self._zero()
        self._count = 0
        if place.rank == 0:  # for all, as they are added up over the ranks
            hits, self._count = since_event
            self._hits = paddle.full([], hits, "float64")
        self._skipped = self._zero()
        self._first_bad = self._zero()  # the step's number; 0: none yet

    def add(self, share: paddle.Tensor, logits: paddle.Tensor, labels: paddle.Tensor) -> None:
        """Count one micro-batch; every step has equally many.

        Args:
            share: 0-d, this micro-batch's part of the mean loss over the global batch.
            logits: [b, classes].
            labels: int64[b].
        """
        self._shares.append(share.detach())
        self._right.append(logits.detach().argmax(axis=-1) == labels)
        self._count += len(labels)

    def finish_step(self, step: int, skipped: paddle.Tensor | None) -> None:
        """Close an optimizer step.

        Args:
            step: its number, from 1.
            skipped: whether AMP's scaler skipped it, on the device; None without a scaler.
        """
        self._steps.append(step)
        if skipped is not None:
            self._found_inf.append(skipped.astype("float64").sum())  # a tensor that is used again
        if len(self._steps) == _KEPT:
            self._fold()

    def _fold(self) -> None:
        """Add up what the steps since the last fold have left."""
        if not self._steps:
            return
        shares = paddle.stack(self._shares).astype("float64")
        losses = shares.reshape([len(self._steps), -1]).sum(axis=1)
        steps = paddle.to_tensor(self._steps, dtype="float64")
        never = paddle.full_like(steps, math.inf)
        first = paddle.where(paddle.isfinite(losses), never, steps).min()
        newly_bad = paddle.logical_and(self._first_bad == 0, paddle.isfinite(first))
        self._first_bad = paddle.where(newly_bad, first, self._first_bad)
        self._loss = losses[-1]
        self._hits = self._hits + paddle.concat(self._right).astype("float64").sum()
        if self._found_inf:
            self._skipped = self._skipped + paddle.stack(self._found_inf).sum()
        self._shares, self._right, self._found_inf, self._steps = [], [], [], []

    def read(self) -> Reading:
        """Reduce over the ranks, wait for the device, and start a new interval.

        Every rank has to call this at the same step.

        Raises:
            NonFiniteLoss: naming the first step and the ranks at which the loss was not finite.
        """
        self._fold()
        local = paddle.stack([self._loss, self._hits, paddle.full([], self._count, "float64")])
        ranks = paddle.zeros([self._place.world_size], dtype="float64")
        ranks[self._place.rank] = self._first_bad
        sums = distributed.sum_over_ranks(paddle.concat([local, ranks])).tolist()
        loss, hits, count, *first_bad = sums
        _refuse_non_finite(first_bad)
        self._hits, self._count = self._zero(), 0
        return Reading(loss, hits / count if count else 0.0, int(self._skipped.item()))

    def since_event(self) -> tuple[float, int]:
        """Right answers and samples since the last reading, over the ranks, for a checkpoint.

        Every rank has to call this at the same step.
        """
        self._fold()
        counted = paddle.stack([self._hits, paddle.full([], self._count, "float64")])
        hits, count = distributed.sum_over_ranks(counted).tolist()
        return hits, int(count)

    def check_finite(self) -> None:
        """Raise as `read` does, and leave the interval as it is."""
        self._fold()
        ranks = paddle.zeros([self._place.world_size], dtype="float64")
        ranks[self._place.rank] = self._first_bad
        _refuse_non_finite(distributed.sum_over_ranks(ranks).tolist())

    @staticmethod
    def _zero() -> paddle.Tensor:
        return paddle.zeros([], dtype="float64")


def _refuse_non_finite(first_bad: list[float]) -> None:
    bad = {rank: int(step) for rank, step in enumerate(first_bad) if step}
    if bad:
        step = min(bad.values())
        ranks = [str(rank) for rank, at in bad.items() if at == step]
        raise NonFiniteLoss(
            f"the loss is not finite at step {step} on rank {', '.join(ranks)}; "
            "nothing was saved after it",
            "lower optimizer.base_lr, lengthen schedule.warmup_epochs, set optimizer.clip_norm, "
            "or look for broken samples; resume=auto continues from the last good checkpoint",
        )
