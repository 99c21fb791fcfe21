"""Exact metrics over any number of ranks: every held-out sample counts once."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from recipes import checkpoint, data, distributed, models, optimization
from recipes.config import Config, UserError
from recipes.data.base import ImageDataset
from recipes.data.decoding_processes import Decoders
from recipes.data.loader import SkipCounter, evaluation_loader, start_decoders
from recipes.data.normalisation import Normalise
from recipes.manifest import STATE, not_understood
from recipes.position import check_state
from recipes.pulse import Phase, Pulse
from recipes.same_training import identity, refuse_another_model
from recipes.snapshot import check_names
from recipes.topology import Place

TOP = (1, 5)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Fractions and a mean over `samples` held-out images; no top-5 where that says nothing."""

    top1: float
    top5: float | None
    loss: float
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """As events and results hold it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def evaluate(
    model: paddle.nn.Layer,
    dataset: ImageDataset,
    config: Config,
    place: Place,
    pulse: Pulse,
    decoders: Decoders | None = None,
) -> Scores:
    """Score a model, which every rank holds equally, on the whole dataset.

    The dataset is cut in fixed batches that are dealt out to the ranks. Each batch's sums go into
    a slot of their own, so the reduction over ranks adds zeros only and the slots are then added
    in one order: the scores are bit-identical on any topology. With five classes or fewer every
    answer is among the top five, and there is no such score.

    Raises:
        UserError: a sample cannot be read, or none could be.
    """
    was_training = model.training
    model.eval()
    normalise = Normalise(dataset, config.dtype)
    slots = -(-len(dataset) // config.eval_batch_size)
    sums = np.zeros((slots, 2 + len(TOP)), dtype=np.float64)  # samples, loss, hits in top-k
    skipped = SkipCounter(dataset, config.dataset.max_skipped)
    batches = evaluation_loader(
        dataset, config.eval_batch_size, place.rank, place.world_size, config, decoders
    )
    with paddle.no_grad(), optimization.autocast(config.amp):
        for batch in batches:
            pulse.mark(Phase.EVALUATING)
            for path in skipped.update(batch):
                _log.warning("skipped %s: cannot be read", path)
            readable = batch.labels >= 0
            if not readable.any():
                continue
            logits = model(normalise(batch.images[readable]))
            labels = batch.labels[readable]
            sums[batch.batch_number] = [len(labels), *_batch_sums(logits, labels)]
    pulse.mark(Phase.STEPPING)  # from here on it waits for the other ranks
    if was_training:
        model.train()
    totals = distributed.sum_over_ranks(paddle.to_tensor(sums)).numpy().sum(axis=0)
    samples, loss, *hits = totals.tolist()
    if samples == 0:
        raise UserError(
            f"none of the {len(dataset)} held-out images could be read",
            "mend the images that the warnings name",
        )
    top1, top5 = (count / samples for count in hits)
    few = models.num_classes(config, dataset) <= max(TOP)
    return Scores(top1, None if few else top5, loss / samples, int(samples))


def _batch_sums(logits: paddle.Tensor, labels: np.ndarray) -> list[float]:
    """The sums of cross-entropy and of hits in the top 1 and 5 over a batch.

    Args:
        logits: [b, classes], on the device.
        labels: int64[b].
    """
    # At least float32: half precision cannot hold a sum of losses.
    logits = logits if logits.dtype == paddle.float64 else logits.astype("float32")
    target = paddle.to_tensor(labels)
    loss = F.cross_entropy(logits, target, reduction="none")
    ranked = paddle.topk(logits, min(max(TOP), logits.shape[-1]), axis=-1)[1]
    hits = (ranked == target.unsqueeze(-1)).astype("int64").numpy()
    return [
        float(loss.astype("float64").sum()),
        *(float(hits[:, :k].sum()) for k in TOP),
    ]


def evaluate_checkpoint(
    config: Config, run_folder: Path, place: Place, pulse: Pulse
) -> tuple[Scores, dict[str, Any]]:
    """``task=evaluate``: score the checkpoint that ``checkpoint=`` names.

    Returns:
        The scores, and the `epoch` (from 0) and `step` that the checkpoint was taken after.

    Raises:
        UserError: there is no such checkpoint, or it is of another model.
    """
    assert config.checkpoint is not None
    dataset = data.build(config.dataset, "eval", config.seed)
    decoders = start_decoders(config, dataset)
    snapshot, state = None, None
    if place.rank == 0:
        found = checkpoint.find(config.checkpoint, run_folder, _log.warning)
        if found is None:
            raise UserError(f"checkpoint={config.checkpoint}: no checkpoint in {run_folder}")
        path, snapshot = found
        try:
            check_state(snapshot.state)
        except ValueError as error:
            raise not_understood(path, STATE, str(error)) from None
        current = identity(config, len(dataset), models.num_classes(config, dataset))
        refuse_another_model(snapshot.state["identity"], current, path, dataset.num_classes)
        state = snapshot.state["position"]
    state = distributed.broadcast_json(state)
    weights = distributed.broadcast_arrays(snapshot.model if snapshot else None)
    model = models.prepare(config, dataset)
    check_names(weights, model.state_dict(), config.checkpoint)
    for name, tensor in model.state_dict().items():
        tensor.set_value(weights[name])
    epoch = state["epoch"] - (state["step_in_epoch"] == 0)  # the one the last step was in
    scores = evaluate(model, dataset, config, place, pulse, decoders)
    return scores, {"epoch": epoch, "step": state["step"]}
