"""The page of all records."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from records import a_record

from benchmarks import record as maker
from benchmarks import report
from recipes import config
from recipes.benchmark import record
from recipes.benchmark.record import PHASES, Record
from recipes.config import Machine, UserError

ROOT = Path(__file__).resolve().parents[2]
GPUS = Machine(visible=None, nvidia_driver=True, paddle_for_gpu=True)


def parsed(**contents: dict[str, Any]) -> dict[str, Record]:
    return {name: record.parse(content, Path(name)) for name, content in contents.items()}


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is followed by `first`."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| topology | {first}"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def five(middle: float) -> tuple[float, ...]:
    return (middle - 2, middle - 1, middle, middle + 1, middle + 2)


def test_the_committed_page_is_that_of_the_committed_records() -> None:
    records = report.read_all(report.RESULTS)
    page = report.PAGE.read_text(encoding="utf-8")
    assert page == report.render(records, Path("results")), "run python -m benchmarks.report"
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (report.PAGE.parent / link).exists(), link


def test_scaling_on_gpus_is_by_the_number_of_gpus() -> None:
    records = parsed(
        four=a_record(4, five(300.0), gpu=True),
        one=a_record(1, five(100.0), gpu=True),
        two=a_record(2, five(150.0), gpu=True, split=False),
    )
    page = report.render(records, Path("results"))
    found = rows(page, "images a step")
    assert [row[0] for row in found] == ["1x1", "1x2", "1x4"]
    assert [row[2] for row in found] == ["100.0", "150.0", "300.0"]
    assert [row[3] for row in found] == ["98.0 to 102.0", "148.0 to 152.0", "298.0 to 302.0"]
    assert [row[4] for row in found] == ["1.00", "1.50", "3.00"]
    assert [row[5] for row in found] == ["100%", "75%", "75%"]
    assert found[0][8] == "90% of a device"
    assert found[0][9] == "[one](results/one.json)"
    assert "There is no record of a GPU" not in page
    splits = rows(page, "data wait")
    assert [row[0] for row in splits] == ["1x1", "1x4"]
    assert splits[0][1:-2] == ["10.0", "10.0", "200.0", "350.0", "40.0", "20.0", "10.0"]
    assert splits[0][-2:] == ["641.0", "1.00"]
    assert len(splits[0]) == len(PHASES) + 3


def test_scaling_on_a_cpu_is_by_the_cores_that_threads_can_use() -> None:
    records = parsed(
        a=a_record(1, five(100.0)),
        b=a_record(4, five(80.0)),
        c=a_record(1, five(60.0), threads=1),
    )
    page = report.render(records, Path("results"))
    efficiency = {row[9]: row[5] for row in rows(page, "images a step")}
    # Two cores either way; the run of one thread has one of them. Its time is the newest.
    assert report.resources(records["c"]) == 1
    assert report.resources(records["a"]) == report.resources(records["b"]) == 2
    assert list(efficiency.values()) == ["100%", "120%", "80%"]


def test_records_that_cannot_be_compared_are_in_tables_of_their_own() -> None:
    other = a_record(2)
    other["machine"]["cpu"] = "Another CPU"
    records = parsed(
        a=a_record(1),
        b=other,
        c=a_record(2, model__name="ResNet50"),
        d=a_record(2, dataset__image_size=32),
        e=a_record(1, gpu=True),
        f=a_record(1, gpu=True, amp__level="O1"),
        g=a_record(4),
    )
    groups = report.grouped(records)
    assert [list(members) for members in groups.values()] == [
        *(["f"], ["e"], ["a", "g"], ["b"], ["d"], ["c"]),
    ]
    titles = [group.title for group in groups]
    assert len(set(titles)) == len({group.slug for group in groups}) == 6
    assert titles[0] == "ResNet18 on digits, 8x8, O1 float16, A GPU"
    page = report.render(records, Path("results"))
    assert [title for title in re.findall(r"^## (.*)$", page, re.M) if title != "GPU"] == titles


def test_without_records_the_page_says_how_to_make_some() -> None:
    page = report.render({}, Path("results"))
    assert "There is no record of a GPU" in page
    assert "There are no records yet" in page


def test_the_command_for_a_gpu_record_composes() -> None:
    page = report.render(parsed(a=a_record()), Path("results"))
    command = next(line for line in page.splitlines() if line.startswith("docker run"))
    words = shlex.split(command)
    config.register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", overrides=words[words.index("train.py") + 1 :])
    made = config.from_hydra(composed, GPUS)
    assert (made.task.name, str(made.shape), made.model.name) == ("benchmark", "1x4", "ResNet50")


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        for devices in (1, 2):
            content = a_record(devices, split=devices == 1)
            (folder / f"r{devices}.json").write_text(json.dumps(content))
        (folder / "bench-2026-01-01.json").write_text("no record")
        arguments = ["--results", str(folder), "--page", str(folder / "PAGE.md")]
        assert report.main(arguments) == 0
    first, second = ([p for p in sorted(folder.rglob("*")) if p.is_file()] for folder in folders)
    assert [path.name for path in first] == [path.name for path in second]
    assert any(path.suffix == ".svg" for path in first)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one


def test_a_plot_whose_records_are_gone_goes_too(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("<svg/>")
    report.draw(parsed(a=a_record(split=False)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [
        "resnet18-on-digits-8x8-float32-2-cores-of-a-cpu.svg"
    ]
    report.draw({}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_record_among_them_is_named(tmp_path: Path) -> None:
    content = a_record()
    del content["usage"]
    (tmp_path / "broken.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"broken\.json: incomplete, usage missing"):
        report.read_all(tmp_path)


# --- benchmarks.record


def test_the_records_of_this_machine_are_all_planned() -> None:
    """Both models, on three topologies, with equal global batches; and their commands compose."""
    config.register_schema()
    made = {}
    for planned in maker.PLANNED:
        for topology in maker.TOPOLOGIES:
            overrides = ["task=benchmark", *planned.overrides, f"topology={topology}", "device=cpu"]
            with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                composed = compose("config", overrides=overrides)
            made[planned.name, topology] = config.from_hydra(composed)
    assert {str(each.shape) for each in made.values()} == {"1x1", "1x2", "1x4"}
    models = {(e.model.name, e.dataset.name, e.global_batch_size) for e in made.values()}
    assert models == {("ResNet18", "digits", 64), ("ResNet50", "synthetic", 8)}
    assert all(each.benchmark.repeats >= 5 for each in made.values())  # else nothing to compare


def test_records_are_moved_once_all_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    seen: list[list[str]] = []

    def measure(command: list[str], **_: Any) -> Any:
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        seen.append(sorted(path.name for path in results.glob("*.json")))
        folder = Path(settings["benchmark.output"])
        folder.mkdir(exist_ok=True)
        content = a_record(int(settings["topology"][-1]))
        (folder / f"{settings['benchmark.name']}.json").write_text(json.dumps(content))
        return type("Ended", (), {"returncode": 0})()

    monkeypatch.setattr("benchmarks.record.subprocess.run", measure)
    options = ["--results", str(results), "--page", str(tmp_path / "PAGE.md"), "--only", "digits"]
    assert maker.main(options) == 0
    names = [f"digits-resnet18-cpu-{topology}" for topology in maker.TOPOLOGIES]
    assert seen == [[], [], []]
    assert sorted(report.read_all(results)) == names
    assert all(name in (tmp_path / "PAGE.md").read_text() for name in names)


def test_a_run_that_fails_leaves_the_records_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = type("Ended", (), {"returncode": 1})()
    monkeypatch.setattr("benchmarks.record.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="ended with status 1"):
        maker.main(["--results", str(tmp_path), "--page", str(tmp_path / "PAGE.md")])
    assert list(tmp_path.iterdir()) == []
