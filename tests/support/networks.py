"""Networks without repeated blocks, as users write them: VGG16, DenseNet, a plain CNN, an LSTM, a DLRM.

The structures are those of their papers and of torchvision; sizes are arguments, small by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

CLASSES = 10
WORDS = 64
DENSE = 13

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: a pooling


class PlainCnn(nn.Module):
    """12 x (convolution, ReLU), all as wide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(12):
            layers += [nn.Conv2d(width if index else 3, width, 3, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(image).mean((2, 3))))


class Vgg16(nn.Module):
    """Configuration D of the paper, `narrower` times narrower; ReLUs in place, as in torchvision."""

    def __init__(self, narrower: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        last = 3
        for width in _VGG16:
            if width:
                layers += [nn.Conv2d(last, width // narrower, 3, padding=1), nn.ReLU(inplace=True)]
                last = width // narrower
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(last * 49, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(image)).flatten(1))


class _DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: list[Tensor]) -> Tensor:
        narrowed = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.dropout(self.conv2(F.relu(self.norm2(narrowed))))


class _DenseBlock(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Every layer of a block sees all layers before it; 121: layers (6, 12, 24, 16), growth 32, width 64."""

    def __init__(self, layers: Sequence[int], growth: int, width: int, dropout: float) -> None:
        super().__init__()
        stages: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d(3, 2, 1),
        ]
        for index, count in enumerate(layers):
            block = [_DenseLayer(width + growth * number, growth, dropout) for number in range(count)]
            stages.append(_DenseBlock(block))
            width += growth * count
            if index < len(layers) - 1:
                convolution = nn.Conv2d(width, width // 2, 1, bias=False)
                stages.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), convolution, nn.AvgPool2d(2)))
                width //= 2
        self.features = nn.Sequential(*stages, nn.BatchNorm2d(width), nn.ReLU())
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.features(image).mean((2, 3)))


class Lstm(nn.Module):
    """A language model of some LSTM layers, which torch runs as one operation."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)


class Dlrm(nn.Module):
    """A perceptron for numbers, a table for each category, their products by pairs, a perceptron on top."""

    def __init__(self, tables: int, rows: int, width: int, dropout: float) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second, persistent=False)
        count = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + count, 32), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(32, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(sparse[:, number]) for number, table in enumerate(self.tables)]
        vectors = torch.stack([x, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.get_buffer("pairs")]
        return self.head(self.top(torch.cat([x, products], 1)))[:, 0]


def plain_cnn(dropout: float = 0.1, *, width: int = 8, size: int = 16) -> Training:
    return _training(lambda: PlainCnn(width, dropout), F.cross_entropy, _picture(size))


def vgg16(dropout: float = 0.1, *, narrower: int = 16, hidden: int = 64, size: int = 32) -> Training:
    return _training(lambda: Vgg16(narrower, hidden, dropout), F.cross_entropy, _picture(size))


def densenet(
    dropout: float = 0.1,
    *,
    layers: Sequence[int] = (3, 3),
    growth: int = 8,
    width: int = 16,
    size: int = 32,
) -> Training:
    return _training(lambda: DenseNet(layers, growth, width, dropout), F.cross_entropy, _picture(size))


def lstm(dropout: float = 0.1, *, layers: int = 4, width: int = 16) -> Training:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return _training(lambda: Lstm(layers, width, dropout), loss, _text)


def dlrm(dropout: float = 0.1, *, tables: int = 6, rows: int = 500, width: int = 8) -> Training:
    def clicks(index: int) -> dict[str, Tensor]:
        sparse = (torch.arange(tables)[:, None] * 7 + torch.arange(3) * index) % rows
        return {"dense": torch.randn(DENSE), "sparse": sparse, "target": torch.tensor(float(index % 2))}

    return _training(lambda: Dlrm(tables, rows, width, dropout), F.binary_cross_entropy_with_logits, clicks)


def _picture(size: int) -> Callable[[int], dict[str, Tensor]]:
    """A bright bar whose place is the class."""

    def picture(index: int) -> dict[str, Tensor]:
        label = index % CLASSES
        image = torch.randn(3, size, size) * 0.1
        image[:, :, label : label + 3] += 1.0
        return {"image": image, "target": torch.tensor(label)}

    return picture


def _text(index: int) -> dict[str, Tensor]:
    row = (torch.arange(13) * (index % 7 + 1) + index) % WORDS
    return {"tokens": row[:-1], "target": row[1:]}


class _Samples:
    def __init__(self, sample: Callable[[int], dict[str, Tensor]]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sample(index)


def _training(
    model: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    sample: Callable[[int], dict[str, Tensor]],
) -> Training:
    def of_batch(output: Any, batch: dict[str, Tensor]) -> Tensor:
        return loss(output, batch["target"])

    return Training(
        model=model,
        loss=of_batch,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01),
        dataset=lambda: _Samples(sample),
        clip_grad_norm=1.0,
    )
