"""LSTM layers, and a speech recognizer made of them."""

from __future__ import annotations

from gradlane.planning.models.layers import Architecture, LayerList

FEATURES = 363
"""Numbers of one frame of speech with its neighbours."""
CELLS = 1024
PROJECTION = 512
"""Width that a layer's output is projected to, as in CNTK's example for AN4."""
PHONE_STATES = 132
FRAMES = 300
"""Frames of an utterance that operation counts assume: three seconds."""


def lstm_speech() -> Architecture:
    """Three projected LSTM layers on speech: 13,637,764 parameters; 0.40 s a batch of 16.

    The network of the low-precision paper's figure 3 ("3 LSTM components", 13 million
    parameters, AN4), after the configuration of CNTK's example for that data set.
    """
    layers = LayerList()
    inputs = FEATURES
    for number in range(3):
        lstm(layers, f"lstm{number}", inputs, CELLS, FRAMES, projection=PROJECTION)
        inputs = PROJECTION
    layers.linear("output", PROJECTION, PHONE_STATES, positions=FRAMES)
    return Architecture("lstm_speech", tuple(layers.layers), 16, 0.40)


def lstm(
    layers: LayerList,
    name: str,
    inputs: int,
    hidden: int,
    words: int,
    *,
    bidirectional: bool = False,
    projection: int = 0,
) -> None:
    """Append one LSTM layer with torch.nn.LSTM's parameters, in its order.

    Args:
        layers: where it goes.
        name: of the layer.
        inputs: width of its input.
        hidden: cells.
        words: length of the sequence.
        bidirectional: whether there is a second one that reads backwards.
        projection: width of the output; 0: the cells.
    """
    gates = 4 * hidden
    outputs = projection or hidden
    shapes: dict[str, tuple[int, ...]] = {}
    for suffix in ("", "_reverse") if bidirectional else ("",):
        shapes[f"weight_ih_l0{suffix}"] = (gates, inputs)
        shapes[f"weight_hh_l0{suffix}"] = (gates, outputs)
        shapes[f"bias_ih_l0{suffix}"] = (gates,)
        shapes[f"bias_hh_l0{suffix}"] = (gates,)
        if projection:
            shapes[f"weight_hr_l0{suffix}"] = (projection, hidden)
    directions = 2 if bidirectional else 1
    products = gates * (inputs + outputs) + projection * hidden
    layers.add(name, directions * words * 2 * products, "LSTM", words, **shapes)
