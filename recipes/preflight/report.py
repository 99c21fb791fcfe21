"""What a person gets to see of the checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recipes import telemetry
from recipes.config import UserError
from recipes.preflight.checks import ERROR, Finding
from recipes.preflight.facts import Facts

if TYPE_CHECKING:
    from rich.table import Table

FILE = "preflight.json"
_NODES_A_TABLE = 4
_GIB = 1 << 30

_log = logging.getLogger(__name__)


def show(
    findings: Sequence[Finding],
    facts: Sequence[Facts],
    run_folder: telemetry.RunFolder,
    *,
    whole: bool,
) -> None:
    """Print what was found, for node 0, and write ``preflight.json`` into the run folder.

    Args:
        whole: print every node's facts as well.

    Raises:
        UserError: the file cannot be written.
    """
    from rich.console import Console

    console = Console()
    telemetry.write_json(
        run_folder.path / FILE,
        {"findings": [asdict(finding) for finding in findings], "nodes": list(facts)},
    )
    if whole:
        for start in range(0, len(facts), _NODES_A_TABLE):
            console.print(facts_table(facts[start : start + _NODES_A_TABLE]))
    if findings and (whole or any(finding.level == ERROR for finding in findings)):
        console.print(findings_text(findings), soft_wrap=True, highlight=False)
    else:
        for finding in findings:
            _log.warning("preflight: %s (%s)", finding.message, finding.remedy)
    if not findings:
        nodes = "1 node" if len(facts) == 1 else f"{len(facts)} nodes"
        _log.info("preflight: %s checked, nothing found", nodes)


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Stop the run if there are errors.

    Raises:
        UserError: with all errors, one a line.
    """
    errors = [finding for finding in findings if finding.level == ERROR]
    if not errors:
        return
    count = "an error" if len(errors) == 1 else f"{len(errors)} errors"
    remedies = dict.fromkeys(finding.remedy for finding in errors)
    raise UserError(
        f"preflight found {count}:\n" + "\n".join(f"  {finding.message}" for finding in errors),
        "; ".join(remedies),
    )


def facts_table(facts: Sequence[Facts]) -> Table:
    """A row for each fact, a column for each node."""
    from rich.table import Table

    table = Table()
    table.add_column("fact")
    for node in facts:
        table.add_column(f"node {node['node']}", overflow="fold")
    described = [dict(_described(node)) for node in facts]
    for name in described[0]:
        table.add_row(name, *(_escaped(node.get(name, "")) for node in described))
    return table


def findings_text(findings: Sequence[Finding]) -> str:
    """Two lines for each finding, in rich's markup."""
    lines = []
    for finding in findings:
        colour = "red" if finding.level == ERROR else "yellow"
        lines.append(f"[{colour}]{finding.level}[/]: {_escaped(finding.message)}")
        lines.append(f"  remedy: {_escaped(finding.remedy)}")
    return "\n".join(lines)


def _described(facts: Facts) -> Iterator[tuple[str, str]]:
    build = facts["build"] or {}
    paddle = build.get("paddle", {})
    yield "host", facts["host"]
    yield "address", f"{facts['address']} ({facts['interface'] or 'no interface has it'})"
    yield "interfaces", "\n".join(f"{name}={v}" for name, v in facts["interfaces"].items())
    yield "Python", facts["python"]
    yield "Paddle", paddle.get("version") or facts["build_problem"] or ""
    yield "CUDA, cuDNN, NCCL", ", ".join(_or_none(paddle.get(k)) for k in ("cuda", "cudnn", "nccl"))
    yield "driver", _or_none(facts["driver"])
    yield "packages", "\n".join(f"{name} {v}" for name, v in build.get("packages", {}).items())
    git = build.get("git")
    yield "git commit", git["commit"][:12] + " (changed)" * git["dirty"] if git else "unknown"
    yield "program's files", facts["source"]
    yield "configuration", facts["config_digest"]
    yield "devices", "\n".join(_device(each) for each in facts["devices"]) or facts["device"]
    yield "free memory", _size(facts["memory_free"])
    yield "free /dev/shm", _size(facts["shared_memory"]["free"])
    yield "free disk", _size(facts["disk_free"])
    yield "dataset", _dataset(facts["config"]["dataset.name"], facts["dataset"])


def _device(device: dict[str, Any]) -> str:
    busy = f", {len(device['processes'])} processes" if device["processes"] else ""
    return f"{device['index']}: {device['name']}{busy}"


def _dataset(name: str, dataset: dict[str, Any]) -> str:
    files = ", ".join(f"{split}: {count} files" for split, count in dataset["files"].items())
    return "\n".join(part for part in (name, dataset["path"], dataset["problem"] or files) if part)


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / _GIB:.2f} GiB"


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
