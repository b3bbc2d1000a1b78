"""The Inception family on ImageNet's 1,000 classes: GoogLeNet, BN-Inception, Inception-V3.

Names, shapes and order follow torchvision's models where it has them; the layer sequence follows
the papers (Szegedy et al. 2014, Ioffe and Szegedy 2015, Szegedy et al. 2015). All without the
auxiliary classifiers, which only training has. Default batch times are those of a slow GPU.
"""

from __future__ import annotations

from gradlane.planning.models.layers import Architecture, FeatureMap, LayerList

CLASSES = 1000


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


def googlenet() -> Architecture:
    """GoogLeNet for 224x224 images: 6,624,904 parameters in 173 tensors; 0.50 s a batch of 128.

    torchvision's, which has batch normalization and 3x3 in place of 5x5 convolutions. The batch
    time is that of Poseidon, section 5.1 (Caffe on a Titan X: 257 images a second).
    """
    net = _Inception()
    shape = net.block("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2, padding=3).pooled(3, 2, 1)
    shape = net.block("conv2", shape, 64, 1)
    shape = net.block("conv3", shape, 192, 3, padding=1).pooled(3, 2, 1)
    for name, widths in _GOOGLENET.items():
        branches = ((widths[0],), widths[1:3], widths[3:5])
        outputs = 0
        for number, branch in enumerate(branches, start=1):
            inner = shape
            for place, width in enumerate(branch):
                path = f"inception{name}.branch{number}" + (f".{place}" if number > 1 else "")
                inner = net.block(path, inner, width, 3 if place else 1, padding=place)
            outputs += inner.channels
        outputs += net.block(f"inception{name}.branch4.1", shape, widths[5], 1).channels
        shape = FeatureMap(outputs, shape.height, shape.width)
        if name == "3b":
            shape = shape.pooled(3, 2, 1)
        if name == "4e":
            shape = shape.pooled(2, 2)
    net.layers.linear("fc", shape.channels, CLASSES)
    return Architecture("googlenet", tuple(net.layers.layers), 128, 0.50)


_GOOGLENET = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Widths of each block: 1x1; 1x1, 3x3; 1x1, "5x5"; after pooling (Szegedy et al. 2014, table 1)."""


def bn_inception() -> Architecture:
    """BN-Inception for 224x224 images: 11,295,240 parameters; 0.20 s a batch of 32.

    Ioffe and Szegedy 2015, figure 5, with biases beside the normalization, as in Caffe.
    """
    net = _Inception(bias=True)
    shape = net.block("conv1", FeatureMap(3, 224, 224), 64, 7, stride=2, padding=3).pooled(3, 2, 1)
    shape = net.block("conv2_reduce", shape, 64, 1)
    shape = net.block("conv2", shape, 192, 3, padding=1).pooled(3, 2, 1)
    for name, (single, triple, double, pooled) in _BN_INCEPTION.items():
        # Blocks without a 1x1 branch halve the image.
        stride = 1 if single else 2
        path = f"inception_{name}"
        outputs = net.block(f"{path}.1x1", shape, single, 1).channels if single else 0
        inner = net.block(f"{path}.3x3_reduce", shape, triple[0], 1)
        reduced = net.block(f"{path}.3x3", inner, triple[1], 3, stride=stride, padding=1)
        inner = net.block(f"{path}.double_3x3_reduce", shape, double[0], 1)
        inner = net.block(f"{path}.double_3x3_1", inner, double[1], 3, padding=1)
        inner = net.block(f"{path}.double_3x3_2", inner, double[1], 3, stride=stride, padding=1)
        outputs += reduced.channels + inner.channels
        if pooled:
            outputs += net.block(f"{path}.pool_proj", shape, pooled, 1).channels
        else:
            outputs += shape.channels
        shape = FeatureMap(outputs, reduced.height, reduced.width)
    net.layers.linear("fc", shape.channels, CLASSES)
    return Architecture("bn_inception", tuple(net.layers.layers), 32, 0.20)


_BN_INCEPTION = {
    "3a": (64, (64, 64), (64, 96), 32),
    "3b": (64, (64, 96), (64, 96), 64),
    "3c": (0, (128, 160), (64, 96), 0),
    "4a": (224, (64, 96), (96, 128), 128),
    "4b": (192, (96, 128), (96, 128), 128),
    "4c": (160, (128, 160), (128, 160), 128),
    "4d": (96, (128, 192), (160, 192), 128),
    "4e": (0, (128, 192), (192, 256), 0),
    "5a": (352, (192, 320), (160, 224), 128),
    "5b": (352, (192, 320), (192, 224), 128),
}
"""Widths of each block: 1x1; 1x1, 3x3; 1x1, two 3x3; after pooling."""


class _Inception:
    """Blocks of the family; those of Inception-V3 are named after the width of their image."""

    def __init__(self, *, bias: bool = False) -> None:
        self.layers = LayerList()
        self._bias = bias

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
        """Append a convolution and its batch normalization."""
        shape = self.layers.convolution(
            f"{name}.conv",
            source,
            channels,
            kernel,
            stride=stride,
            padding=padding,
            bias=self._bias,
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
