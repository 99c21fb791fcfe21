"""What nodes say of themselves is checked before it is used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import ODD

from recipes.config import UserError
from recipes.forms import Malformed
from recipes.introductions import Arrival, Offer, facts_received, of_all, view_received

FACTS = {"node": 0, "host": "a", "address": "10.0.0.1", "port": 5, "form": 2, "more": ["\x1b"]}
ANY = st.recursive(
    st.sampled_from(ODD), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def test_what_is_well_arrives() -> None:
    assert Arrival.received(Arrival("run", "gpu1").value()) == Arrival("run", "gpu1")
    assert Offer.received(Offer("10.0.0.1", 5).value()) == Offer("10.0.0.1", 5)
    assert facts_received(FACTS) == FACTS | {"more": ["\\x1b"]}
    assert view_received({"clock": 1, "unreached": [None, "no"]})["unreached"] == [None, "no"]


@pytest.mark.parametrize("run", ["", ".", "..", "../x", "/etc", "a/b", "a\0", 5, None, "x" * 300])
def test_a_run_folder_that_would_be_elsewhere_is_refused(run: Any) -> None:
    with pytest.raises(Malformed):
        Arrival.received({"run": run, "host": "a"})


def test_the_node_that_said_it_is_named() -> None:
    given = [Arrival("run", "a").value(), {"run": 5, "host": "b"}]
    with pytest.raises(UserError, match="node 1 said of itself what cannot be used: run: no text"):
        of_all(given, Arrival.received)


def test_no_terminal_obeys_a_host() -> None:
    assert Arrival.received({"run": "r", "host": "\x1b[31mred"}).host == "\\x1b[31mred"


@pytest.mark.parametrize("received", [Arrival.received, Offer.received, facts_received])
@given(value=ANY)
def test_anything_is_taken_or_refused(received: Any, value: Any) -> None:
    for each in (value, FACTS | {"host": value}, FACTS | {"address": value, "run": value}):
        try:
            received(each)
        except Malformed:
            continue
