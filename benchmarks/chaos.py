"""Kill a training at random moments, resume it each time on another topology, and compare.

    python -m benchmarks.chaos [--kills 10] [--seed 0] [--out FOLDER]

One training runs undisturbed on one process. Another one, of the same settings, is killed with
SIGKILL (a rank, the launcher or the parent, at random) as often as asked for, and resumed with
``resume=auto`` on a random topology; once, the newest checkpoint is corrupted before. In float64
with sync-BN the losses and scores of both have to agree at every step. Exit status 0 if they do.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from recipes import pointers
from recipes.telemetry import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-9  # relative
DEVICES = (1, 2, 3, 4)
STEPS_BETWEEN = (0, 3)  # optimizer steps further than before that a run gets until it is killed
SETTINGS = (
    *("model=resnet18", "dataset=synthetic", "dataset.image_size=8", "dataset.num_classes=10"),
    *("dataset.train_size=192", "dataset.eval_size=60", "dtype=float64", "sync_bn=true"),
    *("batch_size=null", "global_batch_size=24", "eval_batch_size=20", "optimizer.base_lr=0.05"),
    *("schedule.warmup_epochs=1", "epochs=3", "log.every=1", "save.every_steps=3", "save.keep=3"),
    *("threads=1", "device=cpu"),
)


def main() -> int:
    """Run both trainings and compare them."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--seed", type=int, default=0, help="of the random choices")
    arguments.add_argument("--out", type=Path, help="where both runs go; default: a new folder")
    options = arguments.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    undisturbed = out / "undisturbed"
    print(f"chaos: one process, undisturbed, in {undisturbed}", flush=True)
    subprocess.run(command(undisturbed, 1), check=True, stdout=subprocess.DEVNULL)
    disturbed = out / "disturbed"
    disturb(disturbed, random.Random(options.seed), options.kills)
    return compare(undisturbed, disturbed)


def command(folder: Path, devices: int) -> list[str]:
    """The training in a folder, on so many processes; it continues what is there."""
    return [
        *(sys.executable, str(ROOT / "train.py"), *SETTINGS),
        *(f"topology.devices={devices}", f"hydra.run.dir={folder}", "resume=auto"),
    ]


def disturb(folder: Path, chance: random.Random, kills: int) -> None:
    """Train in a folder through `kills` kills, and then to the end."""
    corrupt_before = chance.randrange(1, kills) if kills > 1 else 0
    for kill in range(kills):
        devices = chance.choice(DEVICES)
        if kill == corrupt_before and kill:
            corrupt_newest(folder)
        steps = chance.randint(*STEPS_BETWEEN)
        victim = run_and_kill(folder, devices, steps, chance)
        at = last_step(folder)
        print(f"kill {kill + 1:2}/{kills}: {victim} of 1x{devices}, at step {at}", flush=True)
        if victim == "nobody":
            return  # it completed first
    devices = chance.choice(DEVICES)
    print(f"then to the end on 1x{devices}", flush=True)
    subprocess.run(command(folder, devices), check=True, stdout=subprocess.DEVNULL)


def run_and_kill(folder: Path, devices: int, steps: int, chance: random.Random) -> str:
    """Start, let it train a few steps, kill one of its processes, and wait for all to be gone."""
    with (folder.parent / "console.log").open("a") as console:
        parent = subprocess.Popen(
            command(folder, devices), stdout=console, stderr=console, start_new_session=True
        )
    goal = last_step(folder) + steps
    started = time.time()
    while parent.poll() is None and not trained_to(folder, goal, started):
        time.sleep(0.05)
    if parent.poll() is not None:
        if parent.returncode != 0:
            raise SystemExit(f"chaos: the run failed by itself, see {console.name}")
        return "nobody"
    time.sleep(chance.uniform(0, 0.5))
    everyone = psutil.Process(parent.pid).children(recursive=True)
    trainers = [p for p in everyone if "train.py" in " ".join(p.cmdline())]
    name, process = chance.choice(
        [("the parent", psutil.Process(parent.pid))]
        + [
            ("the launcher" if "paddle.distributed.launch" in p.cmdline() else "a rank", p)
            for p in trainers
        ]
    )
    process.send_signal(signal.SIGKILL)
    parent.wait(timeout=60)
    _, alive = psutil.wait_procs(everyone, timeout=30)
    if alive:
        raise SystemExit(f"chaos: {name} was killed, and {[p.pid for p in alive]} live on")
    return name


def trained_to(folder: Path, goal: int, since: float) -> bool:
    """Whether a step of at least `goal` has been recorded since a time."""
    return any(
        event["step"] >= goal and event["time"] >= since for event in read_metrics(metrics(folder))
    )


def metrics(folder: Path) -> Path:
    """The events of a run."""
    return folder / "metrics.jsonl"


def last_step(folder: Path) -> int:
    """The last step recorded, 0 before the first."""
    return max((event["step"] for event in read_metrics(metrics(folder))), default=0)


def corrupt_newest(folder: Path) -> None:
    """Flip a byte in the middle of the newest checkpoint's model."""
    last = folder / "checkpoints" / "last"
    if not last.exists():
        return
    model = pointers.follow(last) / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 0xFF
    model.write_bytes(data)
    print(f"corrupted {model.parent.name}", flush=True)


def compare(undisturbed: Path, disturbed: Path) -> int:
    """Print how far both runs are apart; 0 where they agree at every step."""
    left, right = by_step(undisturbed), by_step(disturbed)
    differing = sorted(left.keys() ^ right.keys())
    worst = max(
        (apart(left[key][name], right[key][name]), key, name)
        for key in left.keys() & right.keys()
        for name in ("loss", "top1")
    )
    agree = not differing and worst[0] <= TOLERANCE
    print(
        f"chaos: {len(left.keys() & right.keys())} events compared, largest relative difference "
        f"{worst[0]:.1e} ({worst[2]} of {worst[1][0]} at step {worst[1][1]}), "
        f"{len(differing)} missing or doubled: {'equal' if agree else 'NOT EQUAL'}"
    )
    return 0 if agree else 1


def by_step(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The events of a run by kind and step, each of which may be there once."""
    events = read_metrics(metrics(folder))
    found = {(event["event"], event["step"]): event for event in events}
    if len(found) != len(events):
        raise SystemExit(f"chaos: {metrics(folder)} holds a step twice")
    return found


def apart(left: float, right: float) -> float:
    """The relative difference of two numbers."""
    return abs(left - right) / max(abs(left), abs(right), 1e-300)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
