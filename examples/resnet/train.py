"""A small ResNet with batch norm that reads drawn digits: plain PyTorch, as for one GPU."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

CLASSES = 10
SIDE = 32  # pixels of a picture
SAMPLES = 20_000
WIDTHS = (16, 32, 64)
BLOCKS = 2  # of each width
DROPOUT = 0.1
WARMUP_STEPS = 10

# The digits of a 5x7 dot-matrix display, row by row; the highest of the five bits is the leftmost dot.
FONT = (
    (0x0E, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0E),
    (0x04, 0x0C, 0x04, 0x04, 0x04, 0x04, 0x0E),
    (0x0E, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1F),
    (0x1F, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0E),
    (0x02, 0x06, 0x0A, 0x12, 0x1F, 0x02, 0x02),
    (0x1F, 0x10, 0x1E, 0x01, 0x01, 0x11, 0x0E),
    (0x06, 0x08, 0x10, 0x1E, 0x11, 0x11, 0x0E),
    (0x1F, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08),
    (0x0E, 0x11, 0x11, 0x0E, 0x11, 0x11, 0x0E),
    (0x0E, 0x11, 0x11, 0x0F, 0x01, 0x02, 0x0C),
)


class Block(nn.Module):
    """Two convolutions and the way around them, as He et al. (2016) draw it."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """14 layers, 175 thousand parameters."""

    def __init__(
        self, widths: Sequence[int] = WIDTHS, blocks: int = BLOCKS, dropout: float = DROPOUT
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        before = [widths[0], *widths]
        self.blocks = nn.Sequential(
            *(
                Block(before[place] if first else width, width, 2 if first and place else 1)
                for place, width in enumerate(widths)
                for first in [True] + [False] * (blocks - 1)
            )
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(pictures)), inplace=True)
        x = self.blocks(x)
        return self.head(self.dropout(x.mean((2, 3))))


class Digits:
    """Digits of any size, place and colour on noise; drawn anew in each epoch, the same on every machine.

    Makara seeds the generators by (seed, epoch, index) before it asks for a sample.
    """

    def __init__(self) -> None:
        rows = torch.tensor(FONT)
        self.dots = ((rows.unsqueeze(-1) >> torch.arange(4, -1, -1)) & 1).float()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = index % CLASSES
        height, width = (int(torch.randint(low, high, ())) for low, high in ((18, 29), (12, 23)))
        digit = F.interpolate(self.dots[label][None, None], (height, width), mode="bilinear")[0]
        top, left = (int(torch.randint(0, SIDE - size + 1, ())) for size in (height, width))
        shade = F.pad(digit, (left, SIDE - width - left, top, SIDE - height - top))
        ink, paper = 0.6 + 0.4 * torch.rand(3, 1, 1), 0.4 * torch.rand(3, 1, 1)
        picture = paper + shade * (ink - paper) + 0.1 * torch.randn(3, SIDE, SIDE)
        return {"pictures": (picture - 0.5) / 0.3, "labels": torch.tensor(label)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weights of convolutions decay; biases and what scales a norm do not."""
    decaying = [parameter for _, parameter in named if parameter.dim() > 1]
    others = [parameter for _, parameter in named if parameter.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]], lr=0.02, momentum=0.9, nesterov=True
    )


def build() -> Training:
    return Training(
        model=ResNet,
        loss=loss,
        optimizer=optimizer,
        dataset=Digits,
        schedule=lambda step: min(1.0, (step + 1) / WARMUP_STEPS),
        clip_grad_norm=5.0,
    )
