"""All benchmark records as one page, ``benchmarks/RESULTS.md``, with plots beside the records.

    python -m benchmarks.report

The page says nothing that is not in a record, and is the same for the same records.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.runs import told
from benchmarks.table import markdown
from recipes.benchmark import record
from recipes.benchmark.record import PHASES, Record
from recipes.topology import threads_per_rank

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
PAGE = FOLDER / "RESULTS.md"
GPU_COMMAND = (
    "docker run --rm --gpus all --shm-size=8g --volume /data/imagenet:/workspace/data "
    '--volume "$PWD/outputs:/workspace/outputs" --user "$(id -u):$(id -g)" '
    "fleet-recipes:cu126 train.py task=benchmark recipe=imagenet_resnet50_1x4 "
    "dataset.path=/workspace/data benchmark.output=outputs/benchmarks"
)
INTRODUCTION = """\
# Benchmark results

Made by `python -m benchmarks.report` from the records in [results/](results/); `make records` makes
those of this machine anew, and `python -m benchmarks.compare A B` compares two. A record holds the
raw samples, the composed configuration, the versions, the commit and the machine.

Images/s are those of the training loop that users run, all ranks together, with its logging: the
median of the repetitions and their range, after a warm-up. Parts of a step come from a second loop
that does the same work and waits for the device after each part; "to loop" is its step's time
relative to the first loop's. Communication is what averaging the gradients adds to the backward
pass, the wait for the slowest rank included.
"""
NO_GPU = f"""\
## GPU

There is no record of a GPU. This makes one, on a machine with four of them and the image built by
`make image`, for any other recipe and topology in the same way:

```bash
{GPU_COMMAND}
```
"""
NO_RECORDS = "There are no records yet: `make records` makes those of this machine.\n"


@dataclass(frozen=True, order=True)
class Group:
    """What the records of one table have in common."""

    kind: str  # cpu or gpu
    model: str
    dataset: str
    image_size: int
    precision: str
    device: str

    @classmethod
    def of(cls, made: Record) -> Group:
        """The group that a record belongs to."""
        amp = made.config["amp"]
        precision = made.config.get("dtype", "float32")
        if amp["level"] != "off":
            precision = f"{amp['level']} {amp['dtype']}"
        machine = made.machine
        device = f"{machine.usable_cores} cores of {machine.cpu}"
        if made.usage.kind == "gpu":
            device = machine.gpus[0].name if machine.gpus else "GPU"
        return cls(
            made.usage.kind,
            made.config["model"]["name"],
            made.config["dataset"]["name"],
            int(made.config["dataset"]["image_size"]),
            precision,
            device,
        )

    @property
    def title(self) -> str:
        """As a heading."""
        size = f"{self.image_size}x{self.image_size}"
        return f"{self.model} on {self.dataset}, {size}, {self.precision}, {self.device}"

    @property
    def slug(self) -> str:
        """As a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Render; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the records")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    with told():
        records = read_all(options.results)
    plots = options.results / "plots"
    links = Path(os.path.relpath(options.results, options.page.parent))
    options.page.write_text(render(records, links), encoding="utf-8")
    draw(records, plots)
    print(f"{options.page}: {len(records)} records")
    return 0


def read_all(folder: Path) -> dict[str, Record]:
    """The records of a folder by their files' names, without the tables of `make bench`.

    Raises:
        UserError: one of them is not complete.
    """
    paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("bench-"))
    return {path.stem: record.read(path) for path in paths}


def grouped(records: Mapping[str, Record]) -> dict[Group, dict[str, Record]]:
    """Records by group, those on GPUs first; in a group by the number of ranks, then by time."""
    groups: dict[Group, dict[str, Record]] = {}
    for name, made in records.items():
        groups.setdefault(Group.of(made), {})[name] = made
    return {
        group: dict(
            sorted(
                groups[group].items(),
                key=lambda item: (item[1].world_size, item[1].topology, item[1].made, item[0]),
            )
        )
        for group in sorted(groups, key=lambda group: (group.kind != "gpu", group))
    }


# --- the page -----------------------------------------------------------------------------------


def render(records: Mapping[str, Record], links: Path) -> str:
    """The page.

    Args:
        records: by name.
        links: the folder of the records as seen from the page.
    """
    parts = [INTRODUCTION]
    if not any(made.usage.kind == "gpu" for made in records.values()):
        parts.append(NO_GPU)
    if not records:
        parts.append(NO_RECORDS)
    parts += [section(group, members, links) for group, members in grouped(records).items()]
    return "\n".join(parts)


def section(group: Group, members: Mapping[str, Record], links: Path) -> str:
    """One group: speed and scaling, the parts of a step, the commands."""
    lines = [
        f"## {group.title}",
        "",
        f"![Scaling and parts of a step]({(links / 'plots' / group.slug).as_posix()}.svg)",
        "",
        markdown(scaling(members, links)),
        "",
        scale_note(group),
    ]
    if any(made.split is not None for made in members.values()):
        lines += ["", "Milliseconds of a step:", "", markdown(parts_of_steps(members))]
    lines += ["", "Made by:", "", "```bash"]
    lines += [made.command for made in members.values()]
    lines += ["```", "", *machines(members)]
    return "\n".join(lines) + "\n"


def scaling(members: Mapping[str, Record], links: Path) -> list[list[str]]:
    """The table of speeds."""
    base = base_of(members)
    rows = [
        [
            *("topology", "images a step", "images/s", "range", "speed-up", "efficiency"),
            *("wait for data", "memory a rank", "load", "record"),
        ]
    ]
    for name, made in members.items():
        speed, usage = made.throughput, made.usage
        rows.append(
            [
                made.topology,
                str(made.config["global_batch_size"]),
                f"{speed.median:,.1f}",
                f"{speed.lowest:,.1f} to {speed.highest:,.1f}",
                f"{speed.median / base.throughput.median:.2f}",
                f"{efficiency(made, base):.0%}",
                f"{fmean(speed.data_wait):.1%}",
                f"{max(rank.peak_memory_bytes for rank in usage.ranks) / 2**20:,.0f} MiB",
                record.load_of(usage),
                f"[{name}]({(links / name).as_posix()}.json)",
            ]
        )
    return rows


def parts_of_steps(members: Mapping[str, Record]) -> list[list[str]]:
    """The table of splits."""
    rows = [["topology", *(phase.replace("_", " ") for phase in PHASES), "step", "to loop"]]
    for made in members.values():
        if made.split is None:
            continue
        phases = [f"{made.split.phases[phase] * 1000:,.1f}" for phase in PHASES]
        whole = f"{made.split.step * 1000:,.1f}"
        rows.append([made.topology, *phases, whole, f"{made.split.step / made.loop_step:.2f}"])
    return rows


def base_of(members: Mapping[str, Record]) -> Record:
    """What the others are compared with: the newest of those with the fewest ranks."""
    fewest = min(made.world_size for made in members.values())
    return max(
        (made for made in members.values() if made.world_size == fewest),
        key=lambda made: made.made,
    )


def resources(made: Record) -> int:
    """What a run had to compute with: its GPUs, or the cores that its ranks' threads may use."""
    topology = made.config["topology"]
    if made.usage.kind == "gpu":
        return made.world_size
    cores = made.machine.usable_cores
    threads = made.config.get("threads") or threads_per_rank(cores, topology["devices"])
    return int(topology["nodes"]) * min(cores, int(threads) * int(topology["devices"]))


def efficiency(made: Record, base: Record) -> float:
    """The speed-up over `base`, as a share of the growth in resources."""
    speed_up = made.throughput.median / base.throughput.median
    return speed_up * resources(base) / resources(made)


def scale_note(group: Group) -> str:
    """What the columns of scaling mean."""
    if group.kind == "gpu":
        return "Efficiency is the speed-up over the first row per GPU."
    return (
        "Efficiency is the speed-up over the first row per core. Ranks share a machine's cores, so "
        "more of them add none: above 100% they keep the cores busier than the threads of one "
        "process do, and what is missing below is what it costs to share the work out."
    )


def machines(members: Mapping[str, Record]) -> list[str]:
    """The machines and versions, each once."""
    lines = []
    for made in members.values():
        machine, code = made.machine, made.code
        gpus = f", {len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else ""
        driver = f", driver {machine.driver}" if machine.driver else ""
        line = (
            f"{machine.usable_cores} of {machine.cores} cores of {machine.cpu}{gpus}{driver}, "
            f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.system}; "
            f"Paddle {made.software.paddle['version']}, Python {made.software.python}; "
            f"commit {code.commit[:12]}{'' if code.clean else ' with changes'}."
        )
        if line not in lines:
            lines.append(line)
    return lines


# --- the plots ----------------------------------------------------------------------------------


def draw(records: Mapping[str, Record], folder: Path) -> None:
    """Write an SVG for each group, and remove those of groups that are no more."""
    groups = grouped(records)
    wanted = {folder / f"{group.slug}.svg" for group in groups}
    for path in folder.glob("*.svg"):
        if path not in wanted:
            path.unlink()
    for group, members in groups.items():
        folder.mkdir(parents=True, exist_ok=True)
        plot(members, folder / f"{group.slug}.svg", group.title)


def plot(members: Mapping[str, Record], path: Path, title: str) -> None:
    """Speed by topology with its range beside what perfect scaling would give; parts of a step.

    The same records give the same bytes.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files; needs no display
    from matplotlib import pyplot

    fixed: dict[Any, Any] = {"svg.hashsalt": "fleet-recipes", "svg.fonttype": "none"}
    with matplotlib.rc_context(fixed):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        figure.suptitle(title, fontsize="medium")
        shown = list(members.values())
        places = range(len(shown))
        names = [f"{made.topology}\n{made.config['global_batch_size']} a step" for made in shown]
        speeds = [made.throughput.median for made in shown]
        below = [made.throughput.median - made.throughput.lowest for made in shown]
        above = [made.throughput.highest - made.throughput.median for made in shown]
        left.bar(places, speeds, yerr=[below, above], capsize=4, color="#4477aa", width=0.6)
        base = base_of(members)
        perfect = [base.throughput.median * resources(m) / resources(base) for m in shown]
        left.plot(places, perfect, "k_--", label="perfect scaling", markersize=20, linewidth=0.8)
        left.set_xticks(places, names)
        left.set_ylabel("images/s")
        left.legend()
        bottom = [0.0] * len(shown)
        colours = ("#ee6677", "#ccbb44", "#66ccee", "#4477aa", "#aa3377", "#228833", "#bbbbbb")
        for phase, colour in zip(PHASES, colours, strict=True):
            heights = [made.split.phases[phase] * 1000 if made.split else 0.0 for made in shown]
            right.bar(places, heights, 0.6, bottom, label=phase.replace("_", " "), color=colour)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        right.set_xticks(places, names)
        right.set_ylabel("ms of a step")
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
