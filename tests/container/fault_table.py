"""Fixtures of the tests on several nodes, and the table that `make test-faults` ends with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from containers import Containers
from nodes import Cluster, Ended, make_network, remove_network

ROWS: pytest.StashKey[list[tuple[str, dict[str, Ended]]]] = pytest.StashKey()


@pytest.fixture
def cluster(containers: Containers) -> Iterator[Cluster]:
    """A private network; its containers and itself are removed when the test ends."""
    network = make_network()
    try:
        yield Cluster(containers, network)
    finally:
        containers.remove()
        remove_network(network)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Iterator[dict[str, Ended]]:
    """Where a test leaves how the nodes ended, for the table."""
    ended: dict[str, Ended] = {}
    yield ended
    name = request.node.name.removeprefix("test_").replace("_", " ")
    request.config.stash.setdefault(ROWS, []).append((name, ended))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Fault, seconds until the end on each node, the message."""
    rows = terminalreporter.config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("faults: seconds until the end on each node, and the message")
    for name, ended in rows:
        seconds = "  ".join(f"{label} {each.seconds:.1f}" for label, each in ended.items())
        terminalreporter.line(f"{name:38} {seconds}")
        for message in sorted({error for each in ended.values() for error in each.errors}):
            terminalreporter.line("    " + message.replace("\n", "\n    "))
