"""A translation model in the manner of Sockeye: LSTM encoder and decoder with attention.

Its heaviest tensor is the *first*, the embedding of the source words, whose gradient comes last
in backward and is needed first in the next forward: the case in which no order of transmission
can hide the whole of it (Hieber et al. 2017; P3, section 5.3).
"""

from __future__ import annotations

from gradlane.planning.models.layers import Architecture, LayerList
from gradlane.planning.models.recurrent import lstm

SOURCE_WORDS = 36_000
"""Size of the source vocabulary; makes the first embedding about half of the model."""
TARGET_WORDS = 10_000
EMBEDDING = 512
HIDDEN = 512
WORDS_PER_SENTENCE = 30
"""Length that operation counts assume for both source and target sentences."""


def sockeye() -> Architecture:
    """Two-layer LSTM encoder and decoder with additive attention; 0.50 s a batch of 64.

    Shapes are chosen here, not taken from a release: vocabularies and sizes typical of the
    data set of the P3 paper (IWSLT15), with a source embedding of 18,432,000 parameters.
    """
    layers = LayerList()
    words = WORDS_PER_SENTENCE
    layers.embedding("encoder.embedding", SOURCE_WORDS, EMBEDDING, positions=words)
    lstm(layers, "encoder.lstm0", EMBEDDING, HIDDEN // 2, words, bidirectional=True)
    lstm(layers, "encoder.lstm1", HIDDEN, HIDDEN, words)
    layers.embedding("decoder.embedding", TARGET_WORDS, EMBEDDING, positions=words)
    # The decoder is fed with its previous attention vector beside the embedded word.
    lstm(layers, "decoder.lstm0", EMBEDDING + HIDDEN, HIDDEN, words)
    lstm(layers, "decoder.lstm1", HIDDEN, HIDDEN, words)
    layers.linear("decoder.attention.query", HIDDEN, HIDDEN, positions=words)
    layers.linear("decoder.attention.key", HIDDEN, HIDDEN, positions=words)
    # For each pair of words: add, hyperbolic tangent, dot product; then the weighted sum.
    pairs = words * words
    layers.add("decoder.attention.score", pairs * 6 * HIDDEN, "Attention", weight=(1, HIDDEN))
    layers.linear("decoder.attention.hidden", 2 * HIDDEN, HIDDEN, positions=words)
    layers.linear("decoder.output", HIDDEN, TARGET_WORDS, positions=words)
    return Architecture("sockeye", tuple(layers.layers), 64, 0.50)
