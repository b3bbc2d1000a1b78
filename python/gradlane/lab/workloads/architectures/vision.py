"""Image classifiers on ImageNet's 1,000 classes: ResNet-50, VGG-19 and Inception-V3.

Names, shapes and order follow torchvision's models; the layer sequence follows the papers
(He et al. 2015, Simonyan and Zisserman 2014, Szegedy et al. 2015). Default batch times are those
of a slow GPU at a batch of 32.
"""

from __future__ import annotations

from gradlane.lab.workloads.architectures.layers import Architecture, FeatureMap, LayerList

CLASSES = 1000


def resnet50() -> Architecture:
    """ResNet-50 for 224x224 images: 25,557,032 parameters in 161 tensors; 0.30 s a batch of 32."""
    layers = LayerList()
    shape = layers.convolution("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2, padding=3)
    layers.batch_norm("bn1", shape)
    shape = shape.pooled(3, 2, 1)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            shape = _bottleneck(layers, f"layer{stage}.{block}", shape, width, stride, block == 0)
    layers.linear("fc", shape.channels, CLASSES)
    return Architecture("resnet50", tuple(layers.layers), 32, 0.30)


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


def vgg19() -> Architecture:
    """VGG-19 for 224x224 images: 143,667,240 parameters in 38 tensors; 0.62 s a batch of 32."""
    layers = LayerList()
    shape = FeatureMap(3, 224, 224)
    index = 0
    for width, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(repeats):
            name = f"features.{index}"
            shape = layers.convolution(name, shape, width, 3, padding=1, bias=True)
            index += 2  # The activation that follows has a number of its own.
        shape = shape.pooled(2, 2)
        index += 1
    layers.linear("classifier.0", shape.numel, 4096)
    layers.linear("classifier.3", 4096, 4096)
    layers.linear("classifier.6", 4096, CLASSES)
    return Architecture("vgg19", tuple(layers.layers), 32, 0.62)


def inception_v3() -> Architecture:
    """Inception-V3 for 299x299 images: 23,834,568 parameters; 0.38 s a batch of 32.

    Without the auxiliary classifier, whose 3,326,696 parameters torchvision adds in training.
    """
    net = _Inception()
    shape = net.block("Conv2d_1a_3x3", FeatureMap(3, 299, 299), 32, 3, stride=2)
    shape = net.block("Conv2d_2a_3x3", shape, 32, 3)
    shape = net.block("Conv2d_2b_3x3", shape, 64, 3, padding=1).pooled(3, 2)
    shape = net.block("Conv2d_3b_1x1", shape, 80, 1)
    shape = net.block("Conv2d_4a_3x3", shape, 192, 3).pooled(3, 2)
    for name, pooled_channels in (("5b", 32), ("5c", 64), ("5d", 64)):
        shape = net.mixed_35(f"Mixed_{name}", shape, pooled_channels)
    shape = net.reduce_35("Mixed_6a", shape)
    for name, width in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        shape = net.mixed_17(f"Mixed_{name}", shape, width)
    shape = net.reduce_17("Mixed_7a", shape)
    for name in ("7b", "7c"):
        shape = net.mixed_8(f"Mixed_{name}", shape)
    net.layers.linear("fc", shape.channels, CLASSES)
    return Architecture("inception_v3", tuple(net.layers.layers), 32, 0.38)


class _Inception:
    """The blocks of Inception-V3, each named after the width of the feature map it works on."""

    def __init__(self) -> None:
        self.layers = LayerList()

    def block(
        self,
        name: str,
        source: FeatureMap,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> FeatureMap:
        """Append a convolution without bias and its batch normalization."""
        shape = self.layers.convolution(
            f"{name}.conv", source, channels, kernel, stride=stride, padding=padding
        )
        return self.layers.batch_norm(f"{name}.bn", shape)

    def mixed_35(self, name: str, source: FeatureMap, pooled_channels: int) -> FeatureMap:
        """Append the first kind of block (torchvision's InceptionA)."""
        self.block(f"{name}.branch1x1", source, 64, 1)
        shape = self.block(f"{name}.branch5x5_1", source, 48, 1)
        self.block(f"{name}.branch5x5_2", shape, 64, 5, padding=2)
        shape = self.block(f"{name}.branch3x3dbl_1", source, 64, 1)
        shape = self.block(f"{name}.branch3x3dbl_2", shape, 96, 3, padding=1)
        self.block(f"{name}.branch3x3dbl_3", shape, 96, 3, padding=1)
        self.block(f"{name}.branch_pool", source, pooled_channels, 1)
        return FeatureMap(64 + 64 + 96 + pooled_channels, source.height, source.width)

    def reduce_35(self, name: str, source: FeatureMap) -> FeatureMap:
        """Append the first reduction (torchvision's InceptionB)."""
        reduced = self.block(f"{name}.branch3x3", source, 384, 3, stride=2)
        shape = self.block(f"{name}.branch3x3dbl_1", source, 64, 1)
        shape = self.block(f"{name}.branch3x3dbl_2", shape, 96, 3, padding=1)
        self.block(f"{name}.branch3x3dbl_3", shape, 96, 3, stride=2)
        return FeatureMap(384 + 96 + source.channels, reduced.height, reduced.width)

    def mixed_17(self, name: str, source: FeatureMap, width: int) -> FeatureMap:
        """Append the second kind of block, with factorized 7x7 (torchvision's InceptionC)."""
        row, column = (1, 7), (7, 1)
        self.block(f"{name}.branch1x1", source, 192, 1)
        shape = self.block(f"{name}.branch7x7_1", source, width, 1)
        shape = self.block(f"{name}.branch7x7_2", shape, width, row, padding=(0, 3))
        self.block(f"{name}.branch7x7_3", shape, 192, column, padding=(3, 0))
        shape = self.block(f"{name}.branch7x7dbl_1", source, width, 1)
        shape = self.block(f"{name}.branch7x7dbl_2", shape, width, column, padding=(3, 0))
        shape = self.block(f"{name}.branch7x7dbl_3", shape, width, row, padding=(0, 3))
        shape = self.block(f"{name}.branch7x7dbl_4", shape, width, column, padding=(3, 0))
        self.block(f"{name}.branch7x7dbl_5", shape, 192, row, padding=(0, 3))
        self.block(f"{name}.branch_pool", source, 192, 1)
        return FeatureMap(4 * 192, source.height, source.width)

    def reduce_17(self, name: str, source: FeatureMap) -> FeatureMap:
        """Append the second reduction (torchvision's InceptionD)."""
        shape = self.block(f"{name}.branch3x3_1", source, 192, 1)
        reduced = self.block(f"{name}.branch3x3_2", shape, 320, 3, stride=2)
        shape = self.block(f"{name}.branch7x7x3_1", source, 192, 1)
        shape = self.block(f"{name}.branch7x7x3_2", shape, 192, (1, 7), padding=(0, 3))
        shape = self.block(f"{name}.branch7x7x3_3", shape, 192, (7, 1), padding=(3, 0))
        self.block(f"{name}.branch7x7x3_4", shape, 192, 3, stride=2)
        return FeatureMap(320 + 192 + source.channels, reduced.height, reduced.width)

    def mixed_8(self, name: str, source: FeatureMap) -> FeatureMap:
        """Append the third kind of block, with split 3x3 (torchvision's InceptionE)."""
        self.block(f"{name}.branch1x1", source, 320, 1)
        shape = self.block(f"{name}.branch3x3_1", source, 384, 1)
        self.block(f"{name}.branch3x3_2a", shape, 384, (1, 3), padding=(0, 1))
        self.block(f"{name}.branch3x3_2b", shape, 384, (3, 1), padding=(1, 0))
        shape = self.block(f"{name}.branch3x3dbl_1", source, 448, 1)
        shape = self.block(f"{name}.branch3x3dbl_2", shape, 384, 3, padding=1)
        self.block(f"{name}.branch3x3dbl_3a", shape, 384, (1, 3), padding=(0, 1))
        self.block(f"{name}.branch3x3dbl_3b", shape, 384, (3, 1), padding=(1, 0))
        self.block(f"{name}.branch_pool", source, 192, 1)
        return FeatureMap(320 + 2 * 384 + 2 * 384 + 192, source.height, source.width)
