"""Options of sessions: each in one place, and `gradlane.init` takes and explains all of them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields

import pytest

import gradlane
from gradlane.training.options.option_fields import (
    agreed_options,
    check_options,
    on_command_line,
    option,
)
from gradlane.training.options.options import Options

GIVEN_OTHERWISE = {"factors": "scheme", "prometheus": "prometheus_port"}
IN_ANOTHER_FORM = {"codec", "factors", "pacing", "prometheus", "summary"}


@dataclass(frozen=True)
class Some:
    """Options as any command has them."""

    kind: str = option("a", known=("a", "b"), agreed=True)
    batch_size: int | None = option(None, least=1, most=64)
    wait_s: float = option(1.0, above=0)
    note: str = "free"


def test_init_takes_every_option_with_its_default() -> None:
    parameters = inspect.signature(gradlane.init).parameters
    for one in fields(Options):
        given = parameters[GIVEN_OTHERWISE.get(one.name, one.name)]
        if one.name not in IN_ANOTHER_FORM:
            assert given.default == one.default, one.name


def test_init_explains_every_argument_once_and_in_order() -> None:
    text = inspect.getdoc(gradlane.init) or ""
    arguments = text[text.index("Args:") : text.index("Returns:")]
    explained = re.findall(r"^    (\w+): ", arguments, flags=re.MULTILINE)
    assert explained == list(inspect.signature(gradlane.init).parameters)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "c"}, "unknown kind 'c'; known are a, b"),
        ({"batch_size": 0}, "batch-size is 0; it must be 1 to 64"),
        ({"batch_size": 65}, "batch-size is 65; it must be 1 to 64"),
        ({"wait_s": 0.0}, "wait-s is 0.0; it must be above 0"),
        ({"wait_s": float("nan")}, "wait-s is nan; it must be above 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_options(Some(**given), on_command_line)  # type: ignore[arg-type]


def test_none_and_the_limits_are_in_range() -> None:
    check_options(Some(batch_size=None))
    check_options(Some(batch_size=1))
    check_options(Some(batch_size=64))


def test_what_ranks_agree_on_is_what_says_so() -> None:
    assert agreed_options(Some()) == {"kind": "a"}
    agreed = Options().agreed()
    assert {"strategy", "codec", "update", "frame_bytes", "seed"} <= set(agreed)
    assert not {"interface", "ports", "send_buffer_bytes", "trace", "summary"} & set(agreed)
