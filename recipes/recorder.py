"""What a training tells: events, console lines, curves, progress and its result."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from recipes import distributed, earlier_run, log_lines, telemetry
from recipes.config import Config, dump
from recipes.data import Plan
from recipes.data.loader import Batch
from recipes.data.transfer import DeviceBatch
from recipes.evaluation import Scores
from recipes.metering import Meter
from recipes.position import Position
from recipes.progress import StepDisplay
from recipes.pulse import Phase, Pulse
from recipes.ranking import is_better
from recipes.sample_log import SampleLog
from recipes.topology import Place

_log = logging.getLogger(__name__)


class Recorder:
    """Counts steps and time on every rank; rank 0 also writes and prints.

    For ``task=benchmark`` nothing but training steps is due: no evaluation, no checkpoint. The
    intervals between events are then its repetitions, the first of which ends with the warm-up.

    Attributes:
        position: where the training stands.
    """

    def __init__(
        self,
        config: Config,
        run: telemetry.RunFolder,
        place: Place,
        plan: Plan,
        position: Position,
        progress: StepDisplay,
        pulse: Pulse,
    ) -> None:
        self.position = position
        self._config = config
        self._place = place
        self._plan = plan
        self._progress = progress
        self._pulse = pulse
        whole = config.epochs * plan.steps_per_epoch
        self._total = min(whole, config.max_steps or whole)
        self._started = time.monotonic()
        self._benchmark = config.task.name == "benchmark"
        self._first_event = config.benchmark.warmup if self._benchmark else 0
        self._trained = 0.0  # seconds in training up to the last event
        self._trained_samples = 0
        self._earlier_speed: float | None = None
        self._clock_started = time.monotonic()
        self._start_interval()
        self._log: telemetry.MetricsLog | None = None
        self._board: telemetry.Board | None = None
        self._seen: SampleLog | None = None
        if config.log.samples:
            self._seen = SampleLog(run.logs / f"samples-rank-{place.rank}.jsonl", position.step)
        if place.rank == 0:
            self._open(run)
        # Rank 0 alone has read what was recorded before.
        self.position = Position(**distributed.broadcast_json(asdict(self.position)))
        if self.done and place.rank == 0:
            _log.info("no step is left to train: %s", self._limit())
        progress.start(self._total, position.step)

    @property
    def done(self) -> bool:
        """Whether the last step of the run has been taken."""
        return self.position.step >= self._total

    def _limit(self) -> str:
        """Why the run ends where it does, and how it would go on."""
        key, value = "max_steps", self._config.max_steps
        if self._total != value:
            key, value = "epochs", self._config.epochs
        return (
            f"{key}={value} ends with step {self._total}, and step {self.position.step} is done "
            f"(a larger {key}= trains on)"
        )

    def waiting(self, loader: Iterable[DeviceBatch]) -> Iterator[DeviceBatch]:
        """The loader's batches, with the time that each `next` takes added up."""
        batches = iter(loader)
        while True:
            asked = time.monotonic()
            self._pulse.mark(Phase.READING, self.position.step)
            moved = next(batches, None)
            self._waited += time.monotonic() - asked
            self._pulse.mark(Phase.STEPPING, self.position.step)
            if moved is None:
                return
            self._show(moved.batch)
            if self._seen is not None:
                self._seen.add(self.position.epoch, self.position.step + 1, moved.batch)
            yield moved

    def finish_step(self, epoch: int, batch: Batch, learning_rate: float, meter: Meter) -> None:
        """Count an optimizer step; where an event is due, read the meter and record it.

        One is due every ``log.every`` steps and, in a training, at the end of an epoch and of the
        run: small data would tell of nothing else.

        Args:
            epoch: of the step, from 0.
            batch: the step's last micro-batch.
            learning_rate: the one the step was taken with.
        """
        ended = batch.step + 1 == self._plan.steps_per_epoch
        self.position = replace(
            self.position,
            step=self.position.step + 1,
            epoch=epoch + ended,
            step_in_epoch=0 if ended else batch.step + 1,
            samples=self.position.samples + batch.global_count,
        )
        self._samples += batch.global_count
        self._progress.advance(self.position.step)
        if self._event_due:
            reading = meter.read()
            self._record_training(epoch, learning_rate, asdict(reading))

    @property
    def _event_due(self) -> bool:
        steps = self.position.step - self._first_event
        last = self.position.step_in_epoch == 0 or self.done
        return steps % self._config.log.every == 0 or (last and not self._benchmark)

    def position_now(self, meter: Meter) -> Position:
        """The position with what the interval has counted so far; for all ranks at one step."""
        hits, count = meter.since_event()
        return replace(self.position, since_event=(hits, count))

    @property
    def save_due(self) -> bool:
        """Whether the configuration wants a checkpoint of this very step."""
        if self._benchmark:
            return False
        position, save = self.position, self._config.save
        at_epoch = position.step_in_epoch == 0 and position.epoch % save.every_epochs == 0
        at_step = save.every_steps is not None and position.step % save.every_steps == 0
        return self.done or at_epoch or at_step

    @property
    def evaluation_due(self) -> bool:
        """Whether an epoch or the run has ended, and its evaluation is not recorded yet."""
        if self._benchmark:
            return False
        position = self.position
        ended = position.step > 0 and (position.step_in_epoch == 0 or self.done)
        return ended and (position.final is None or position.final["step"] != position.step)

    def evaluated(self, scores: Scores) -> bool:
        """Record an evaluation; True where it is the best so far."""
        epoch = self.position.epoch - (self.position.step_in_epoch == 0)
        metrics = {"epoch": epoch, "step": self.position.step, **scores.as_dict()}
        event = {"event": "eval", **metrics}
        best = self.position.best
        improved = is_better(metrics, best)
        self.position = replace(self.position, final=metrics, best=metrics if improved else best)
        self._write(event)
        _log.info(log_lines.eval_line(event, epochs=self._config.epochs))
        return improved

    def pause(self) -> None:
        """Stop the clock of training, before evaluation and saving; the interval goes on after."""
        self._interval_seconds += time.monotonic() - self._clock_started

    def go_on(self) -> None:
        """Start the clock again."""
        self._clock_started = time.monotonic()

    def result(self, status: str = "completed") -> telemetry.Result:
        """How the training ended; closes the files."""
        self._progress.stop()
        if self._log is not None:
            self._log.close()
        if self._board is not None:
            self._board.close()
        if self._seen is not None:
            self._seen.close()
        seconds = self._trained + self._interval_seconds
        samples = self._trained_samples + self._samples
        return telemetry.Result(
            status=status,
            final=self.position.final,
            best=self.position.best,
            # A run that had ended already, and is continued, has trained before.
            images_per_second=samples / seconds if seconds else self._earlier_speed,
            wall_seconds=time.monotonic() - self._started,
            topology=str(self._config.shape),
            world_size=self._place.world_size,
        )

    def _record_training(self, epoch: int, learning_rate: float, reading: dict[str, Any]) -> None:
        # The next interval begins here: what it costs to write and print is part of it.
        now = time.monotonic()
        seconds = self._interval_seconds + now - self._clock_started
        self._clock_started = now
        self._trained += seconds
        self._trained_samples += self._samples
        event = {
            "event": "train",
            "epoch": epoch,
            "step": self.position.step,
            "samples": self.position.samples,
            "lr": learning_rate,
            **reading,
            "images_per_second": self._samples / seconds,
            "data_wait": self._waited / seconds,
        }
        self._start_interval()
        self._write(event)
        left = (self._total - self.position.step) * self._trained * self._plan.global_batch
        _log.info(
            log_lines.train_line(
                event,
                epochs=None if self._benchmark else self._config.epochs,
                steps=self._total,
                seconds_left=left / self._trained_samples,
            )
        )

    def _start_interval(self) -> None:
        self._interval_seconds = 0.0  # up to the last pause
        self._waited = 0.0
        self._samples = 0

    def _write(self, event: dict[str, Any]) -> None:
        if self._log is not None:
            event = self._log.append(event)
        if self._board is not None:
            self._board.add(event)

    def _open(self, run: telemetry.RunFolder) -> None:
        """Continue the run's records; what was logged after the checkpoint is superseded."""
        if self.position.step:
            for change in earlier_run.changed(self._config, run):
                _log.info("from step %d on, %s", self.position.step + 1, change)
        self._log = telemetry.MetricsLog(run.metrics)
        history = self._log.rewind(self.position.step)  # before files are changed: it may refuse
        telemetry.begin(run, dump(self._config))
        self._take_scores(history)
        self._earlier_speed = telemetry.speed_of(history)
        self._board = telemetry.Board(
            run.visualdl,
            name=run.path.name,
            hyperparameters=hyperparameters(self._config),
            config=dump(self._config),
            history=history,
        )
        self._to_show = self._config.log.images

    def _take_scores(self, history: list[dict[str, Any]]) -> None:
        """Take over an evaluation of this very step: its checkpoint was written before it."""
        final, best = telemetry.scores_of(history)
        if final is not None and final["step"] == self.position.step:
            self.position = replace(self.position, final=final, best=best)

    def _show(self, batch: Batch) -> None:
        """Put the first input samples on the board."""
        if self._board is None or not self._to_show:
            return
        # As floats, which the board stretches to the whole range: not every dataset uses it.
        images = np.asarray(batch.images[: self._to_show])  # loader=dali has them on the device
        self._board.add_images(images.astype(np.float32))
        self._to_show = 0


def hyperparameters(config: Config) -> dict[str, Any]:
    """The settings that runs are compared by."""
    return {
        "recipe": config.recipe_name,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "topology": str(config.shape),
        "global_batch_size": config.global_batch_size,
        "optimizer": config.optimizer.name,
        "base_lr": config.optimizer.base_lr,
        "weight_decay": config.optimizer.weight_decay,
        "schedule": config.schedule.name,
        "warmup_epochs": config.schedule.warmup_epochs,
        "label_smoothing": config.label_smoothing,
        "amp": config.amp.level,
        "sync_bn": config.sync_bn,
        "epochs": config.epochs,
        "seed": config.seed,
    }
