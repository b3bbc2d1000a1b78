"""Training goes on with codecs that keep nothing; those that keep something are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gradlane.training.options.options import Options
from tests.built import needs_core

pytestmark = needs_core


@pytest.mark.parametrize(
    "codec", ["bf16", "f16", "qsgd:bits=8", "int8", {"*.weight": "qsgd", "*": "raw"}]
)
def test_codecs_that_keep_nothing_go_with_it(codec: Any) -> None:
    options = Options.of(going_on=True, codec=codec)
    assert options.going_on.on and options.codec != "raw"


@pytest.mark.parametrize(
    "codec",
    ["onebit", "topk", "dgc", "qsgd:residual=on", {"*.bias": "bf16", "*": "int8:residual=on"}],
)
def test_codecs_that_keep_what_they_have_not_sent_are_refused(codec: Any) -> None:
    assert Options.of(codec=codec).codec != "raw"
    with pytest.raises(ValueError, match="keeps what a step has not sent"):
        Options.of(going_on=True, codec=codec)
