"""Every construct of the table does what the table says, and the page says what the table does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import gradlane
from tests.torch_versions import parse_release, torch_release
from tests.training.model.constructs import PAGE, Construct, all_constructs, page

CONSTRUCTS = all_constructs()
CASES = [
    pytest.param(construct, defer, id=f"{construct.name} defer={defer}")
    for construct in CONSTRUCTS
    for defer in construct.defers
]


@pytest.mark.parametrize(("construct", "defer"), CASES)
def test_construct(construct: Construct, defer: Any) -> None:
    if construct.needs is not None and importlib.util.find_spec(construct.needs) is None:
        pytest.skip(f"{construct.needs} is not installed")
    if construct.newer_than and torch_release() <= parse_release(construct.newer_than):
        pytest.skip(f"it takes a torch newer than {construct.newer_than}")
    if construct.refused is None:
        construct.check(defer)
        return
    with pytest.raises(
        (gradlane.GradlaneError, ValueError, AttributeError, RuntimeError)
    ) as caught:
        construct.check(defer)
    assert construct.refused in str(caught.value)


def test_names_are_unique() -> None:
    names = [(construct.section, construct.name) for construct in CONSTRUCTS]
    assert len(names) == len(set(names))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(CONSTRUCTS), "run: python -m tests.training.model.constructs"
