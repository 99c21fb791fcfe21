"""Two records: what differs in set-up, and whether their speeds do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import a_record

from benchmarks import compare
from recipes.benchmark import record
from recipes.benchmark.record import Record, Throughput

ROOT = Path(__file__).resolve().parents[2]


def parsed(content: dict[str, Any]) -> Record:
    return record.parse(content, Path("r.json"))


def written(path: Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def throughput(samples: list[float]) -> Throughput:
    return Throughput.of(samples, samples)


def exact_probability(a: list[float], b: list[float]) -> float:
    """The Mann-Whitney test by counting all ways to share the ranks out (no ties)."""

    def u(first: tuple[int, ...]) -> int:
        return sum(first) - len(first) * (len(first) - 1) // 2

    ranks = {value: rank for rank, value in enumerate(sorted(a + b))}
    ways = [u(w) for w in itertools.combinations(range(len(a) + len(b)), len(a))]
    found, largest = u(tuple(ranks[value] for value in a)), len(a) * len(b)
    extreme = min(found, largest - found)
    return sum(each <= extreme or each >= largest - extreme for each in ways) / len(ways)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(1, 1e4), min_size=10, max_size=12, unique=True))
def test_the_probability_is_that_of_the_exact_test(values: list[float]) -> None:
    a, b = values[:5], values[5:]
    assert compare.probability_of(a, b) == pytest.approx(min(1.0, exact_probability(a, b)))


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(1, 1e4), min_size=10, max_size=10, unique=True))
def test_with_five_repetitions_speeds_differ_where_their_ranges_do_not_overlap(
    values: list[float],
) -> None:
    a, b = values[:5], values[5:]
    apart = max(a) < min(b) or max(b) < min(a)
    assert compare.differ(throughput(a), throughput(b)) == apart
    low, high = sorted(values)[:5], sorted(values)[5:]
    assert compare.differ(throughput(low), throughput(high))


def test_an_outlier_does_not_hide_a_difference_of_many_repetitions() -> None:
    slow, fast = [100.0 + i for i in range(9)], [110.0 + i for i in range(9)]
    assert compare.differ(throughput([*slow, 130.0]), throughput(fast))
    assert not compare.differ(throughput(slow), throughput([s + 0.5 for s in slow]))


@pytest.mark.parametrize(("first", "second"), [(1, 9), (4, 4), (9, 4)])
def test_few_repetitions_tell_nothing(first: int, second: int) -> None:
    a, b = [1.0 + i for i in range(first)], [100.0 + i for i in range(second)]
    assert compare.differ(throughput(a), throughput(b)) is None


def test_what_differs_is_named() -> None:
    a = a_record(1)
    b = a_record(2, model__name="ResNet50")
    b["code"]["clean"] = False
    b["software"]["packages"]["numpy"] = "2.5.0"
    b["software"]["packages"]["rich"] = "15.0"
    b["machine"]["usable_cores"] = 1
    found = {key: (left, right) for key, left, right in compare.differences(parsed(a), parsed(b))}
    assert found == {
        "config.model.name": ("ResNet18", "ResNet50"),
        "config.topology.devices": (1, 2),
        "config.batch_size": (64, 32),
        "code.clean": (True, False),
        "software.packages.numpy": ("2.4.6", "2.5.0"),
        "software.packages.rich": (None, "15.0"),
        "machine.usable_cores": (2, 1),
    }
    text = compare.describe_setup(parsed(a), parsed(b), ("one", "two"))
    assert "software.packages.rich   -         15.0" in text
    assert compare.describe_setup(parsed(a), parsed(a), ("one", "two")) == "set-up: the same"


def test_a_records_name_is_no_set_up() -> None:
    a, b = a_record(benchmark__name="x"), a_record(benchmark__name="y")
    assert compare.differences(parsed(a), parsed(b)) == []


@pytest.mark.parametrize(
    ("samples", "status", "verdict"),
    [
        ((100.0, 101.0, 99.0, 100.5, 99.5), 0, "do not differ beyond their spread (p = 1)"),
        ((50.0, 51.0, 52.0, 53.0, 49.0), 1, "differ beyond their spread (p = 0.00794)"),
        ((50.0, 51.0), 3, "too few repetitions"),
    ],
)
def test_the_exit_status_is_the_verdict(
    samples: tuple[float, ...],
    status: int,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = written(tmp_path / "a.json", a_record())
    b = written(tmp_path / "b.json", a_record(samples=samples))
    assert compare.main([a, b]) == status
    said = capsys.readouterr().out
    assert verdict in said
    assert "b has" in said
    assert "of the speed of a" in said


def test_what_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    good = written(tmp_path / "a.json", a_record())
    content = a_record()
    del content["machine"]
    bad = written(tmp_path / "b.json", content)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", good, bad],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "b.json: incomplete, machine missing" in ended.stderr
    assert "Traceback" not in ended.stderr
