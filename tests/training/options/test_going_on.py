"""Training goes on with all codecs but dgc, which is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

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
