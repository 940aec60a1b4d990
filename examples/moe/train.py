"""A byte-level transformer with mixtures of experts on Python's manual: plain PyTorch, as for one GPU."""

import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 4
EXPERTS = 4
CHOSEN = 2  # experts for each token
ROOM = 1.25  # places in an expert, against an even spread of the tokens
BALANCE = 0.01  # weight of the balance among the losses
DROPOUT = 0.1
WARMUP_STEPS = 20


class Experts(nn.Module):
    """Each token goes to the `CHOSEN` best of its router's `EXPERTS`, as far as these have room.

    All shapes are static: an expert has a fixed number of places, a token beyond them is passed over (the
    residual stream carries it on). After Lepikhin et al., "GShard" (2020).
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.contract = nn.Parameter(torch.empty(experts, 2 * width, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output, how far the experts' loads are from even: 1 at best)."""
        tokens = x.flatten(0, 1)
        experts = self.router.out_features
        places = math.ceil(ROOM * CHOSEN * tokens.shape[0] / experts)
        chances = F.softmax(self.router(tokens), dim=-1)
        best, which = chances.topk(CHOSEN, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        # First choices take their places before second ones: (choice, token) in that order.
        wants = (which.t().flatten().unsqueeze(-1) == torch.arange(experts, device=x.device)).long()
        place = ((wants.cumsum(0) - 1) * wants).sum(-1)
        sits = (place.unsqueeze(-1) == torch.arange(places, device=x.device)).to(x.dtype)
        seat = wants.to(x.dtype).unsqueeze(-1) * sits.unsqueeze(1)  # (choice and token, expert, place)
        seat = seat.unflatten(0, (CHOSEN, -1))
        given = torch.einsum("ktep,td->epd", seat, tokens)
        made = torch.bmm(F.gelu(torch.bmm(given, self.expand)), self.contract)
        output = torch.einsum("ktep,tk,epd->td", seat, best, made)
        load = wants[: tokens.shape[0]].to(x.dtype).mean(0)
        return output.unflatten(0, x.shape[:2]), experts * (load * chances.mean(0)).sum()


class Block(nn.Module):
    def __init__(self, width: int, experts: int, dropout: float) -> None:
        super().__init__()
        self.rate = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.experts = Experts(width, experts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        made, balance = self.experts(self.norm2(x))
        return x + self.dropout(made), balance


class MixtureGPT(nn.Module):
    """1.4 million parameters, of which a token meets about two thirds."""

    def __init__(
        self, width: int = WIDTH, layers: int = LAYERS, experts: int = EXPERTS, dropout: float = DROPOUT
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, experts, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, balance of the experts, as a mean over the blocks)."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        total = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.head(self.norm(x)), total / len(self.blocks)


class Manual:
    """Windows of CONTEXT bytes of the reference manual that Python's `help()` prints."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    logits, balance = output
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + BALANCE * balance


def build() -> Training:
    return Training(
        model=MixtureGPT,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3, weight_decay=0.01),
        dataset=Manual,
        schedule=lambda step: min(1.0, (step + 1) / WARMUP_STEPS),
        clip_grad_norm=1.0,
    )
