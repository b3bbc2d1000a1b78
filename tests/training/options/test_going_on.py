"""Training goes on with all codecs but dgc, which is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gradlane.training.options.going_on import GoingOn
from gradlane.training.options.options import Options, keywords_of
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


@pytest.mark.parametrize("ring", [{"strategy": "ring"}, {"scheme": "ring"}])
def test_a_ring_refuses_codecs_whose_sums_cannot_be_made_anew(ring: dict[str, Any]) -> None:
    for codec, why in (
        *((one, "holds back parts of sums") for one in RESIDUALS),
        ("qsgd:bits=8,ring=integer", "added up by scales of all ranks"),
        ({"*.weight": "bf16:residual=on", "*": "raw"}, "holds back parts of sums"),
    ):
        options = keywords_of(codec=codec, **ring)
        assert Options.of(**options).codec != "raw"
        with pytest.raises(ValueError, match=rf"going_on with codec .* on a ring: .*{why}"):
            Options.of(**options, going_on=True)


@pytest.mark.parametrize("codec", ["raw", "bf16", "qsgd:bits=8", "int8"])
def test_a_ring_goes_on_with_codecs_that_hold_nothing_back(codec: str) -> None:
    assert Options.of(strategy="ring", codec=codec, going_on=True).codec == codec


def test_ranks_that_must_be_left_are_whole_nodes() -> None:
    going_on = GoingOn(min_ranks=5)
    assert going_on.core_options()["min_ranks"] == 5
    assert going_on.core_options(ranks_each=2)["min_ranks"] == 3
