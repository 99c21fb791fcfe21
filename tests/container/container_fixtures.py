"""Fixtures of the container tests: `pytest_plugins = ["container_fixtures"]` in a test file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import (
    CERTIFICATE_MARKER,
    Containers,
    build_image,
    docker,
    find_engine_fault,
    read_content_tag,
)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The CPU image of this tree, built only where its content has changed: its tag."""
    tag = read_content_tag()
    if docker("image", "inspect", tag).returncode != 0:
        settings = (os.environ.get(name) for name in ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"))
        trusted = Path(next(filter(None, settings), "/etc/ssl/certs/ca-certificates.crt"))
        bundle = tmp_path_factory.mktemp("certificates") / "bundle.pem"
        bundle.write_text(f"# {CERTIFICATE_MARKER}\n{trusted.read_text('utf-8')}", "utf-8")
        build_image(tag, bundle)
    return tag


@pytest.fixture
def containers(image: str) -> Iterator[Containers]:
    """Containers of the image, removed when the test ends, however it ends."""
    made = Containers(image)
    yield made
    made.remove()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, with the reason, where there is no Docker engine."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    fault = find_engine_fault()
    for item in here:
        if fault is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs Docker: {fault}"))
        # The first of them builds the image, which takes minutes.
        item.add_marker(pytest.mark.timeout(1800))
