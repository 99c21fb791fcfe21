"""From the command to the end of the first step, on two ranks: ours, and a bare script's.

    python -m benchmarks.start_time

The bare script (`bare_start`) is started by ``python -m paddle.distributed.launch``, ours by
``python train.py``: the same model, data, optimizer and global batch. They take turns. Both end
where rank 0 tells its first loss.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.runs import ROOT, environment, told
from benchmarks.table import Row
from recipes.config import UserError

TURNS = 5
DEADLINE = 300.0  # seconds for one start
POLL_SECONDS = 0.01
GLOBAL_BATCH = 64
SAID = "step 1 loss"  # with which the bare script begins the line of its first step
OURS = (
    *("train.py", "recipe=digits_resnet18", "topology=1x2", "device=cpu", "max_steps=1"),
    *("log.every=1", f"global_batch_size={GLOBAL_BATCH}"),
)
BARE = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row; the exit status is 1 where the target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_time", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="of each (default: %(default)s)")
    options = parser.parse_args(arguments)
    with told():
        row = measure(options.turns)
    print(table.text([row]))
    return 0 if row.met else 1


def measure(turns: int = TURNS) -> Row:
    """The row of the table; each side starts once more before, to read files into memory.

    Raises:
        UserError: a start failed.
    """
    ours, bare = [], []
    for turn in range(turns + 1):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            first = start_ours(folder)
            second = start_bare(folder)
        if turn > 0:
            ours.append(first)
            bare.append(second)
    return Row(
        name="from the command to the end of step 1, topology 1x2",
        against="a bare script under paddle.distributed.launch",
        target="not slower",
        limit=1.0,
        better="lower",
        unit="s",
        ours=ours,
        peer=bare,
        paired=True,
    )


def start_ours(folder: Path) -> float:
    """Seconds until rank 0's first train event is in metrics.jsonl."""
    run = folder / "run"
    command = [sys.executable, *OURS, f"hydra.run.dir={run}"]
    return seconds_until(command, run / "metrics.jsonl", '"event": "train"', folder)


def start_bare(folder: Path) -> float:
    """Seconds until rank 0's first line about a step is in the launcher's log of it."""
    logs = folder / "launcher"
    script = str(ROOT / "benchmarks" / "bare_start.py")
    command = [sys.executable, *BARE, "--log_dir", str(logs), script]
    return seconds_until(command, logs / "workerlog.0", SAID, folder)


def seconds_until(command: Sequence[str], file: Path, text: str, folder: Path) -> float:
    """Start, wait until a file holds a text, and end what was started.

    Raises:
        UserError: it ended before, or took too long; with the end of what it said.
    """
    variables = {**environment(), "PYTHONPATH": str(ROOT)}
    with (folder / "console").open("w+") as console:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                ended = process.poll() is not None
                seconds = time.monotonic() - began
                if file.exists() and text in file.read_text(errors="replace"):
                    return seconds
                if ended or seconds > DEADLINE:
                    console.seek(0)
                    raise UserError(
                        f"{' '.join(command[1:])}: no first step within {seconds:.0f} s:\n"
                        f"{console.read()[-2000:]}"
                    )
                time.sleep(POLL_SECONDS)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it started, which are in its session: at first by asking."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
