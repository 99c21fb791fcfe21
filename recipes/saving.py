"""What a checkpoint says of a training, and how a training continues from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from recipes import batch_norm, checkpoint, distributed
from recipes.config import Config, UserError
from recipes.manifest import RANKS, STATE, not_understood
from recipes.position import Position, check_state, check_within, read_position
from recipes.same_training import refuse_another_training
from recipes.snapshot import Snapshot, restore, snapshot_of
from recipes.telemetry import RunFolder
from recipes.topology import Place

_STATISTICS = "running_statistics"

_log = logging.getLogger(__name__)


class Saver:
    """Saves and resumes one training. Rank 0 reads and writes; the others get it from there.

    Args:
        described: `same_training.identity` of it.
        classes: the dataset's, of which the model may have more.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        place: Place,
        model: paddle.nn.Layer,
        optimizer: paddle.optimizer.Optimizer,
        scaler: paddle.amp.GradScaler,
        described: Mapping[str, Any],
        classes: int,
    ) -> None:
        self._config = config
        self._run = run
        self._place = place
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._identity = dict(described)
        self._classes = classes
        self._resumed: dict[str, np.ndarray] = {}
        self._writer = checkpoint.Writer(run.checkpoints, config.save.keep)

    def resume(self) -> Position:
        """Continue as ``resume=`` says; a fresh position where it says nothing.

        Raises:
            UserError: the checkpoint is damaged, or of another training.
        """
        snapshot, source = None, ""
        if self._place.rank == 0 and self._config.resume is not None:
            snapshot, source = self._read(self._config.resume)
        state = distributed.broadcast_json(snapshot.state if snapshot else None)
        if state is None:
            return Position()
        model = distributed.broadcast_arrays(snapshot.model if snapshot else None)
        moments = distributed.broadcast_arrays(snapshot.optimizer if snapshot else None)
        self._resumed = distributed.broadcast_arrays(snapshot.ranks if snapshot else None)
        restore(Snapshot(model, moments, state), self._model, self._optimizer, self._scaler, source)
        if self._place.rank == 0 and self._config.resume == "auto":
            self._set_aside(Path(source))
        position = read_position(state)
        _log.info("continuing after step %d from %s", position.step, source)
        return position

    def save(self, position: Position) -> None:
        """Take the training as it stands, and write it behind the steps that follow.

        Every rank has to call this at the same step.

        Raises:
            UserError: the checkpoint before could not be written; older ones are intact.
        """
        statistics = self._all_statistics()
        if self._place.rank != 0:
            return
        state = {
            "step": position.step,
            "position": asdict(position),
            "random": {"seed": self._config.seed},
            "identity": self._identity,
        }
        snapshot = snapshot_of(self._model, self._optimizer, self._scaler, state)
        if statistics is not None:
            snapshot.ranks = {_STATISTICS: statistics}
            snapshot.model |= self._mean_statistics(statistics)
        self._writer.submit(snapshot)

    def mark_best(self, step: int) -> None:
        """Let ``best`` point to the checkpoint of a step.

        Raises:
            UserError: it could not be written.
        """
        if self._place.rank == 0:
            self._writer.mark_best(step)

    def finish(self, *, completed: bool) -> None:
        """Return once all that was saved is on disk.

        Args:
            completed: the training has; of its checkpoints those of use from then on are kept.

        Raises:
            UserError: it could not be written.
        """
        self._writer.wait()
        if completed and self._place.rank == 0:
            checkpoint.prune(self._run.checkpoints, self._config.save.keep_finished)

    def _all_statistics(self) -> np.ndarray | None:
        """Each rank's running statistics of batch-norm, [world size, numbers]; None where the
        ranks have the same."""
        own = batch_norm.running_statistics(self._model)
        if self._config.sync_bn or self._place.world_size == 1 or not own:
            return None
        rows = distributed.gather(paddle.concat([each.flatten() for each in own]))
        return None if (rows == rows[0]).all() else rows

    def _mean_statistics(self, statistics: np.ndarray) -> dict[str, np.ndarray]:
        """The mean over the ranks, by name: what the model is to be evaluated with."""
        keys = {tensor.name: key for key, tensor in self._model.state_dict().items()}
        mean, named = statistics.mean(axis=0, dtype=np.float64), {}
        for tensor in batch_norm.running_statistics(self._model):
            size = int(tensor.size)
            values = mean[:size].reshape(tensor.shape).astype(statistics.dtype)
            named[keys[tensor.name]], mean = values, mean[size:]
        return named

    def restore_own(self) -> None:
        """Give this rank its own running statistics back, once the model has been wrapped.

        Wrapping sends rank 0's to all. On another number of ranks than the checkpoint's, and with
        sync-BN, whose ranks never differ, all keep the mean.
        """
        statistics = self._resumed.get(_STATISTICS)
        if statistics is None or len(statistics) != self._place.world_size or self._config.sync_bn:
            return
        row = statistics[self._place.rank]
        for tensor in batch_norm.running_statistics(self._model):
            size = int(tensor.size)
            tensor.set_value(row[:size].reshape(tensor.shape))
            row = row[size:]

    def _read(self, resume: str) -> tuple[Snapshot | None, str]:
        found = checkpoint.find(resume, self._run.path, _log.warning)
        if found is None:
            _log.info(
                "resume=auto: no checkpoint in %s, starting from the beginning "
                "(hydra.run.dir=… names the run to continue)",
                self._run.path,
            )
            return None, ""
        path, snapshot = found
        try:
            check_state(snapshot.state)
        except ValueError as error:
            raise not_understood(path, STATE, str(error)) from None
        refuse_another_training(snapshot.state["identity"], self._identity, path, self._classes)
        position = read_position(snapshot.state)
        try:
            check_within(
                position, self._identity["train_size"], self._identity["global_batch_size"]
            )
        except ValueError as error:
            raise not_understood(path, STATE, str(error)) from None
        self._check_ranks(snapshot.ranks, path)
        return snapshot, str(path)

    def _check_ranks(self, ranks: Mapping[str, np.ndarray], path: Path) -> None:
        """See that each rank's statistics are as many as the model has."""
        if not ranks:
            return
        own = batch_norm.running_statistics(self._model)
        statistics = ranks.get(_STATISTICS)
        size = sum(int(each.size) for each in own)
        if (
            len(ranks) != 1
            or statistics is None
            or statistics.ndim != 2
            or statistics.shape[1] != size
            or statistics.dtype.kind != "f"
        ):
            raise not_understood(path, RANKS, f"not {size} {_STATISTICS} for each rank")

    def _set_aside(self, used: Path) -> None:
        """Rename the damaged checkpoints of this run that were passed over."""
        try:
            aside = checkpoint.set_aside_damaged(self._run.checkpoints, used)
        except OSError as error:
            raise UserError(
                f"{self._run.checkpoints} cannot be written: {error.strerror}",
                "make the folder writable, or continue in another one: "
                f"resume={used} hydra.run.dir=FOLDER",
            ) from error
        for path in aside:
            _log.warning("kept the damaged checkpoint as %s", path)
