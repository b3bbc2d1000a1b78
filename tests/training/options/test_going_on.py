"""Training goes on with all codecs but dgc; that and joining with residuals are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gradlane.training.options.option_groups import Rendezvous
from gradlane.training.options.options import Options
from tests.built import needs_core

pytestmark = needs_core

RESIDUALS = ["onebit", "topk", "qsgd:residual=on", {"*.bias": "bf16", "*": "int8:residual=on"}]


@pytest.mark.parametrize(
    "codec", ["bf16", "f16", "qsgd:bits=8", "int8", {"*.weight": "qsgd", "*": "raw"}, *RESIDUALS]
)
def test_codecs_go_with_it(codec: Any) -> None:
    options = Options.of(going_on=True, codec=codec)
    assert options.going_on.on and options.codec != "raw"


@pytest.mark.parametrize("codec", ["dgc", "dgc:momentum=0", {"*.bias": "bf16", "*": "dgc"}])
def test_momentum_in_a_codec_is_refused(codec: Any) -> None:
    assert Options.of(codec=codec).codec != "raw"
    with pytest.raises(ValueError, match=r"going_on with codec 'dgc.*use topk"):
        Options.of(going_on=True, codec=codec)


@pytest.mark.parametrize("codec", RESIDUALS)
def test_a_rank_does_not_join_where_residuals_are_kept(codec: Any) -> None:
    with pytest.raises(ValueError, match=r"join with codec .* without what they have held back"):
        Options.of(going_on=True, codec=codec, rendezvous=Rendezvous(join=True))
    assert Options.of(going_on=True, codec="bf16", rendezvous=Rendezvous(join=True)).going_on.on
