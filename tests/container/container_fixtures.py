"""Fixtures of the container tests: `pytest_plugins = ["container_fixtures"]` in a test file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import Containers, ImageBuild, find_engine_fault

_BUILD = pytest.StashKey[ImageBuild]()


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> str:
    """The CPU image of this tree: its tag."""
    return request.config.stash[_BUILD].finish()


@pytest.fixture
def containers(image: str) -> Iterator[Containers]:
    """Containers of the image, removed when the test ends, however it ends."""
    made = Containers(image)
    yield made
    made.remove()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of this folder last, while the image is built; skip them, with the reason,
    where there is no Docker engine."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    items[:] = [item for item in items if item not in here] + here
    fault = find_engine_fault() if here else None
    for item in here:
        if fault is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs Docker: {fault}"))
        # The first of them may have to wait for the image.
        item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build the image, where a test that will run needs it."""
    needed = any(
        "image" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("skip")
        for item in session.items
    )
    if needed and not session.config.option.collectonly:
        session.config.stash[_BUILD] = ImageBuild()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no build behind."""
    build = config.stash.get(_BUILD, None)
    if build is not None:
        build.end()
