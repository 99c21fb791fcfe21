"""What our training loop costs beside a bare one: the same model, data and optimizer.

    python -m benchmarks.loop_cost

Ours is `trainer.train` with everything on: metrics.jsonl, VisualDL, console lines every 20 steps,
the marks for a parent, the check for a loss that is not finite. The bare loop is what Paddle's
manual shows, and reads its loss every 20 steps. Both take turns in one process, 20 steps each, so
that each turn has a neighbour measured in the same circumstances.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import table
from benchmarks.runs import ROOT, environment, told
from benchmarks.table import Row
from recipes.config import Config, UserError, compose, register_schema
from recipes.pulse import Phase, Pulse

if TYPE_CHECKING:
    from recipes.data.loader import Batch

TURN = 20  # steps, which is log.every
WARMUP = 1  # turns of each
TURNS = 20
OVERRIDES = (
    *("task=benchmark", "dataset=digits", "device=cpu", f"benchmark.steps={TURN}"),
    *("benchmark.split_steps=0", "optimizer.base_lr=0.01"),
)
# A step of about 30 ms: small enough to see the cost of a loop in it.
MODEL = ("model=paddleclas", "model.name=MobileNetV1_x0_25", "batch_size=16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row; the exit status is 1 where the target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop_cost", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="of each (default: %(default)s)")
    parser.add_argument("--samples", type=Path, help="only write the samples there, as JSON")
    parser.add_argument("overrides", nargs="*", default=MODEL, help="model and batch")
    options = parser.parse_args(arguments)
    with told():
        if options.samples:
            samples = take_turns(options.turns, options.overrides)
            options.samples.write_text(json.dumps(samples))
            return 0
        row = measure(options.turns, options.overrides)
    print(table.text([row]))
    return 0 if row.met else 1


def measure(turns: int = TURNS, overrides: Sequence[str] = MODEL) -> Row:
    """The row of the table, measured in a process of its own.

    Raises:
        UserError: that process failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        samples = Path(scratch) / "samples.json"
        command = [
            *(sys.executable, "-m", "benchmarks.loop_cost", *overrides),
            *("--turns", str(turns), "--samples", str(samples)),
        ]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            raise UserError(f"benchmarks.loop_cost failed: {ended.stderr.strip()[-2000:]}")
        ours, bare = json.loads(samples.read_text())
    return Row(
        name="a training step through our loop, telemetry on",
        against="a bare Paddle loop",
        target="at most 1 % slower",
        limit=1.01,
        better="lower",
        unit="ms a step",
        ours=[seconds / TURN * 1000 for seconds in ours],
        peer=[seconds / TURN * 1000 for seconds in bare],
        paired=True,
        note=f"turns of {TURN} steps in one process; neighbours are compared",
    )


def take_turns(turns: int, overrides: Sequence[str]) -> tuple[list[float], list[float]]:
    """Seconds of each turn, ours and the bare loop's, the first turns left out."""
    from recipes import worker
    from recipes.progress import NoDisplay
    from recipes.topology import Place

    steps = (WARMUP + turns) * TURN
    register_schema()
    with tempfile.TemporaryDirectory() as folder:
        extent = ("benchmark.warmup=0", f"benchmark.repeats={steps // TURN}")
        config, path = compose(
            ROOT / "conf", [*OVERRIDES, *extent, *overrides, f"hydra.run.dir={folder}/run"]
        )
        place = Place(rank=0, world_size=1, local_rank=0, node=0)
        worker.import_paddle()  # quietly, before others do
        from recipes import distributed, telemetry, trainer

        distributed.start(config, place)
        telemetry.setup_logging(place.tag)
        pulse = Turns(BareLoop(config), Path(folder) / "pulse")
        trainer.train(config, telemetry.RunFolder(path), place, NoDisplay(), pulse)
    return pulse.ours[WARMUP:], pulse.bare[WARMUP:]


@dataclass
class Turns:
    """A pulse that lets the bare loop have its turn after each 20 steps of the one that marks it.

    It writes the marks that a parent reads, so that these cost what they cost in a job.
    """

    loop: BareLoop
    path: Path
    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        from recipes.pulse import SharedPulse

        self._pulse: Pulse = SharedPulse(self.path)
        self._seen = 0
        self._began: float | None = None

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """As of any pulse; a turn ends with the first mark after its last step."""
        if step is not None and step % TURN == 0 and (step > self._seen or self._began is None):
            now = time.perf_counter()
            if self._began is not None:
                self.ours.append(now - self._began)
                self.loop.run(TURN)
                self.bare.append(time.perf_counter() - now)
            self._seen = step
            self._began = time.perf_counter()
        self._pulse.mark(phase, step)

    def asks_to_stop(self, step: int) -> bool:
        """As of any pulse."""
        return self._pulse.asks_to_stop(step)


class BareLoop:
    """The loop of Paddle's manual: model, loss, backward, step."""

    def __init__(self, config: Config) -> None:
        import paddle

        from recipes import data, models, optimization
        from recipes.data.normalisation import Normalise

        self._config = config
        train_set = data.build(config.dataset, "train", config.seed)
        assert config.global_batch_size is not None
        self._plan = data.Plan(len(train_set), config.global_batch_size, config.seed, 0, 1)
        paddle.seed(config.seed)
        self._model = models.prepare(config, train_set)
        self._schedule = optimization.build_schedule(config, self._plan.steps_per_epoch)
        self._optimizer = optimization.build_optimizer(config, self._model, self._schedule)
        self._normalise = Normalise(train_set, config.dtype)
        self._train_set: Any = train_set
        self._batches = self._read()

    def run(self, steps: int) -> float:
        """Take steps; the last loss."""
        import paddle
        import paddle.nn.functional as F

        self._model.train()
        for _ in range(steps):
            batch = next(self._batches)
            images, labels = self._normalise(batch.images), paddle.to_tensor(batch.labels)
            loss = F.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
            self._optimizer.clear_grad()
            self._schedule.step()
        return float(loss)

    def _read(self) -> Iterator[Batch]:
        from recipes.data.loader import train_loader

        for epoch in count():
            yield from train_loader(self._train_set, self._plan, epoch, 0, self._config)


if __name__ == "__main__":
    sys.exit(main())
