"""Image classifiers with convolutions one after another: ResNets, VGGs, AlexNet, CIFAR-10 quick.

Names, shapes and order follow torchvision's models where it has them; the layer sequence follows
the papers (He et al. 2015, Simonyan and Zisserman 2014, Krizhevsky 2014). Default batch times are
those of a slow GPU.
"""

from __future__ import annotations

from gradlane.planning.models.layers import Architecture, FeatureMap, LayerList

CLASSES = 1000
CLASSES_22K = 21_841
"""Classes of ImageNet22K (Poseidon, section 5)."""


def resnet50() -> Architecture:
    """ResNet-50 for 224x224 images: 25,557,032 parameters in 161 tensors; 0.30 s a batch of 32."""
    return _resnet("resnet50", (3, 4, 6, 3), 0.30)


def resnet101() -> Architecture:
    """ResNet-101 for 224x224 images: 44,549,160 parameters; 0.57 s a batch of 32."""
    return _resnet("resnet101", (3, 4, 23, 3), 0.57)


def resnet152() -> Architecture:
    """ResNet-152 for 224x224 images: 60,192,808 parameters; 0.85 s a batch of 32."""
    return _resnet("resnet152", (3, 8, 36, 3), 0.85)


def _resnet(name: str, blocks_of_stages: tuple[int, ...], batch_time_s: float) -> Architecture:
    layers = LayerList()
    shape = layers.convolution("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2, padding=3)
    layers.batch_norm("bn1", shape)
    shape = shape.pooled(3, 2, 1)
    widths = (64, 128, 256, 512)
    for stage, (width, blocks) in enumerate(zip(widths, blocks_of_stages, strict=True), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            shape = _bottleneck(layers, f"layer{stage}.{block}", shape, width, stride, block == 0)
    layers.linear("fc", shape.channels, CLASSES)
    return Architecture(name, tuple(layers.layers), 32, batch_time_s)


def _bottleneck(
    layers: LayerList, name: str, source: FeatureMap, width: int, stride: int, projects: bool
) -> FeatureMap:
    """Append a bottleneck block with the stride on its 3x3 convolution, as torchvision has it."""
    shape = layers.convolution(f"{name}.conv1", source, width, 1)
    layers.batch_norm(f"{name}.bn1", shape)
    shape = layers.convolution(f"{name}.conv2", shape, width, 3, stride=stride, padding=1)
    layers.batch_norm(f"{name}.bn2", shape)
    shape = layers.convolution(f"{name}.conv3", shape, 4 * width, 1)
    layers.batch_norm(f"{name}.bn3", shape)
    if projects:
        shape = layers.convolution(f"{name}.downsample.0", source, 4 * width, 1, stride=stride)
        layers.batch_norm(f"{name}.downsample.1", shape)
    return shape


def resnet110() -> Architecture:
    """ResNet-110 for CIFAR-10: 1,727,962 parameters; 0.15 s a batch of 128.

    He et al. 2015, section 4.2: three stages of 18 blocks with two 3x3 convolutions each, and
    shortcuts without parameters (option A).
    """
    layers = LayerList()
    shape = layers.convolution("conv1", FeatureMap(3, 32, 32), 16, 3, padding=1)
    layers.batch_norm("bn1", shape)
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(18):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            shape = layers.convolution(f"{name}.conv1", shape, width, 3, stride=stride, padding=1)
            layers.batch_norm(f"{name}.bn1", shape)
            shape = layers.convolution(f"{name}.conv2", shape, width, 3, padding=1)
            layers.batch_norm(f"{name}.bn2", shape)
    layers.linear("linear", shape.channels, 10)
    return Architecture("resnet110", tuple(layers.layers), 128, 0.15)


def vgg16() -> Architecture:
    """VGG-16 for 224x224 images: 138,357,544 parameters in 32 tensors; 0.49 s a batch of 32."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), CLASSES, 0.49)


def vgg19() -> Architecture:
    """VGG-19 for 224x224 images: 143,667,240 parameters in 38 tensors; 0.62 s a batch of 32."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), CLASSES, 0.62)


def vgg19_22k() -> Architecture:
    """VGG-19 with the 21,841 classes of ImageNet22K: 229,052,817 parameters; 0.64 s a batch of 32.

    Poseidon, section 5 (VGG19-22K, "229M parameters").
    """
    return _vgg("vgg19_22k", (2, 2, 4, 4, 4), CLASSES_22K, 0.64)


def _vgg(
    name: str, convolutions: tuple[int, ...], classes: int, batch_time_s: float
) -> Architecture:
    layers = LayerList()
    shape = FeatureMap(3, 224, 224)
    index = 0
    for width, repeats in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(repeats):
            shape = layers.convolution(f"features.{index}", shape, width, 3, padding=1, bias=True)
            index += 2  # The activation that follows has a number of its own.
        shape = shape.pooled(2, 2)
        index += 1
    layers.linear("classifier.0", shape.numel, 4096)
    layers.linear("classifier.3", 4096, 4096)
    layers.linear("classifier.6", 4096, classes)
    return Architecture(name, tuple(layers.layers), 32, batch_time_s)


def alexnet() -> Architecture:
    """AlexNet for 224x224 images: 61,100,840 parameters in 16 tensors; 0.25 s a batch of 256.

    In the form of Krizhevsky 2014, which torchvision has. The batch time is that of Poseidon,
    section 2.2 (Titan X).
    """
    layers = LayerList()
    shape = layers.convolution(
        "features.0", FeatureMap(3, 224, 224), 64, 11, stride=4, padding=2, bias=True
    ).pooled(3, 2)
    shape = layers.convolution("features.3", shape, 192, 5, padding=2, bias=True).pooled(3, 2)
    for index, width in ((6, 384), (8, 256), (10, 256)):
        shape = layers.convolution(f"features.{index}", shape, width, 3, padding=1, bias=True)
    shape = shape.pooled(3, 2)
    layers.linear("classifier.1", shape.numel, 4096)
    layers.linear("classifier.4", 4096, 4096)
    layers.linear("classifier.6", 4096, CLASSES)
    return Architecture("alexnet", tuple(layers.layers), 256, 0.25)


def cifar10_quick() -> Architecture:
    """Caffe's CIFAR-10 quick: 145,578 parameters in 10 tensors; 0.05 s a batch of 100."""
    layers = LayerList()
    shape = FeatureMap(3, 32, 32)
    for number, width in enumerate((32, 32, 64), start=1):
        shape = layers.convolution(f"conv{number}", shape, width, 5, padding=2, bias=True)
        # Caffe pools 3x3 with stride 2 and rounds up, which halves, as 2x2 does.
        shape = shape.pooled(2, 2)
    layers.linear("ip1", shape.numel, 64)
    layers.linear("ip2", 64, 10)
    return Architecture("cifar10_quick", tuple(layers.layers), 100, 0.05)
