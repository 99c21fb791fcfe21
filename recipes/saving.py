"""What a checkpoint says of a training, and how a training continues from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import paddle

from recipes import checkpoint, distributed
from recipes.config import Config
from recipes.telemetry import RunFolder
from recipes.topology import Place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a training stands: it goes on with step `step_in_epoch` of epoch `epoch`, from 0."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0  # images seen over all ranks
    final: dict[str, Any] | None = None  # the last evaluation
    best: dict[str, Any] | None = None  # the evaluation with the best top-1


def identity(config: Config, train_size: int, num_classes: int) -> dict[str, Any]:
    """What must stay the same for a continued training to be the same training."""
    return {
        "model": config.model.name,
        "num_classes": num_classes,
        "dataset": config.dataset.name,
        "train_size": train_size,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "dtype": config.dtype,
    }


class Saver:
    """Saves and resumes one training. Rank 0 reads and writes; the others get it from there."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        place: Place,
        model: paddle.nn.Layer,
        optimizer: paddle.optimizer.Optimizer,
        scaler: paddle.amp.GradScaler,
        described: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._run = run
        self._place = place
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._identity = dict(described)

    def resume(self) -> Position:
        """Continue as ``resume=`` says; a fresh position where it says nothing.

        Raises:
            UserError: the checkpoint is damaged, or of another training.
        """
        if self._config.resume is None:
            return Position()
        snapshot, source = None, ""
        if self._place.rank == 0:
            snapshot, source = self._read(self._config.resume)
        state = distributed.broadcast_json(snapshot.state if snapshot else None)
        if state is None:
            return Position()
        model = distributed.broadcast_arrays(snapshot.model if snapshot else None)
        moments = distributed.broadcast_arrays(snapshot.optimizer if snapshot else None)
        checkpoint.restore(
            checkpoint.Snapshot(model, moments, state),
            self._model,
            self._optimizer,
            self._scaler,
            source,
        )
        position = Position(**state["position"])
        _log.info("continuing after step %d from %s", position.step, source)
        return position

    def save(self, position: Position, *, improved: bool) -> None:
        """Write a checkpoint of the model as it stands.

        Raises:
            UserError: the disk is full or cannot be written; older checkpoints are intact.
        """
        if self._place.rank != 0:
            return
        state = {
            "step": position.step,
            "position": asdict(position),
            "random": {"seed": self._config.seed},
            "identity": self._identity,
        }
        snapshot = checkpoint.snapshot_of(self._model, self._optimizer, self._scaler, state)
        checkpoint.save(self._run.checkpoints, snapshot, best=improved, keep=self._config.save.keep)

    def _read(self, resume: str) -> tuple[checkpoint.Snapshot | None, str]:
        path = checkpoint.resolve(resume, self._run.path, _log.warning)
        if path is None:
            _log.info(
                "resume=auto: no checkpoint in %s, starting from the beginning "
                "(hydra.run.dir=… names the run to continue)",
                self._run.path,
            )
            return None, ""
        snapshot = checkpoint.load(path)
        checkpoint.compare_identity(snapshot.state["identity"], self._identity, path)
        return snapshot, str(path)
