"""Residual networks for images (He et al., 2016), with batch norm.

Place in the flow: a user's model, and the trunk of the paper's large-classification example, where
`fc` has a hundred thousand classes and needs `wh.split`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; as wide out as its `width`."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolved image to the shortcut."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; four times as wide out as its `width`."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolved image to the shortcut."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """Images in, class logits out.

    Args:
        block: the kind of block.
        depths: blocks in each group; each group after the first halves the image.
        widths: width of each group.
        num_classes: outputs of `fc`.
        small_images: a 3x3 stem that keeps the size, in place of the 7x7 one with pooling, which
            leaves a quarter of it.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
        *,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        channels = widths[0]
        if small_images:
            self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        for group, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for index in range(depth):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(block(channels, width, stride))
                channels = width * block.expansion
        self.blocks = nn.ModuleList(blocks)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        self.apply(_init_weights)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, 3, height, width] to logits [B, num_classes]."""
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        for block in self.blocks:
            x = block(x)
        return self.fc(self.flatten(self.average(x)))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50 for images of about 224x224: 25.6 million parameters with 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), (64, 128, 256, 512), num_classes)


def resnet_tiny(num_classes: int = 10) -> ResNet:
    """A network of four blocks for images of about 16x16, small enough for tests."""
    return ResNet(BasicBlock, (2, 2), (8, 16), num_classes, small_images=True)
