"""Layers of well-known models: parameter shapes, names, and operations a sample.

Nothing here computes: a replay workload needs only what a layer weighs and how long it takes
relative to the others. Names and order of the vision models are those of torchvision's
`named_parameters()`.
"""

from __future__ import annotations

from gradlane.lab.workloads.architectures.layers import Architecture, Layer, ParameterShape
from gradlane.lab.workloads.architectures.translation import sockeye
from gradlane.lab.workloads.architectures.vision import inception_v3, resnet50, vgg19

ARCHITECTURES = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "inception_v3": inception_v3,
    "sockeye": sockeye,
}
"""Function that describes each architecture, by the name of its workload."""

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Layer",
    "ParameterShape",
    "inception_v3",
    "resnet50",
    "sockeye",
    "vgg19",
]
