"""Layers of well-known models: parameter shapes, names, and operations a sample.

Nothing here computes: a replay workload needs only what a layer weighs and how long it takes
relative to the others. Names and order of the vision models are those of torchvision's
`named_parameters()` where it has them.
"""

from __future__ import annotations

from collections.abc import Callable

from gradlane.planning.models.inception import bn_inception, googlenet, inception_v3
from gradlane.planning.models.layers import Architecture, ModelLayer, ParameterShape
from gradlane.planning.models.recommendation import dlrm
from gradlane.planning.models.recurrent import lstm_speech
from gradlane.planning.models.transformers import (
    bert_base,
    gpt2_medium,
    gpt2_small,
    llama_1b,
    llama_1b_lora,
    vit_b16,
)
from gradlane.planning.models.translation import sockeye
from gradlane.planning.models.vision import (
    alexnet,
    cifar10_quick,
    resnet50,
    resnet101,
    resnet110,
    resnet152,
    vgg16,
    vgg19,
    vgg19_22k,
)

ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "inception_v3": inception_v3,
    "sockeye": sockeye,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "resnet110": resnet110,
    "googlenet": googlenet,
    "bn_inception": bn_inception,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "vgg19_22k": vgg19_22k,
    "cifar10_quick": cifar10_quick,
    "lstm_speech": lstm_speech,
    "gpt2_small": gpt2_small,
    "gpt2_medium": gpt2_medium,
    "bert_base": bert_base,
    "vit_b16": vit_b16,
    "llama_1b": llama_1b,
    "llama_1b_lora": llama_1b_lora,
    "dlrm": dlrm,
}
"""Function that describes each architecture, by the name of its workload."""

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "ModelLayer",
    "ParameterShape",
    "alexnet",
    "bert_base",
    "bn_inception",
    "cifar10_quick",
    "dlrm",
    "googlenet",
    "gpt2_medium",
    "gpt2_small",
    "inception_v3",
    "llama_1b",
    "llama_1b_lora",
    "lstm_speech",
    "resnet50",
    "resnet101",
    "resnet110",
    "resnet152",
    "sockeye",
    "vgg16",
    "vgg19",
    "vgg19_22k",
    "vit_b16",
]
