"""Models that users bring, none of them changed: transformers from a small config, and the examples.

Each function takes the probability of dropout and gives the `Training` of a run that takes under a second.
Importing a family is left to its function: who tests one does not wait for the others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from mean_teacher import mean_teacher
from networks import densenet, dlrm, lstm, plain_cnn, vgg16
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # a config is all that is needed; nothing is looked up

VOCABULARY = 96
LENGTH = 16
WIDTH = 32
PICTURE = 16  # pixels
CLASSES = 10
_IGNORED = -100

Batch = dict[str, Tensor]


def gpt2(dropout: float = 0.1) -> Training:
    """GPT-2: tied embeddings, position embeddings from a range, a causal mask."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=4,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _training(lambda: GPT2LMHeadModel(config), _next_token_loss, Texts)


class Adapted(nn.Module):
    """A frozen layer and two small matrices beside it."""

    def __init__(self, layer: nn.Module, shape: torch.Size, rank: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(dropout)
        self.down = nn.Parameter(torch.randn(shape[0], rank) * 0.1)
        self.up = nn.Parameter(torch.zeros(rank, shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.dropout(x) @ self.down @ self.up


def lora(dropout: float = 0.1) -> Training:
    """GPT-2, frozen, with low-rank adapters at the attentions' inputs: what is trained is spread thinly."""
    pretrained = gpt2(0.0)

    def adapted() -> nn.Module:
        model: Any = pretrained.model()
        model.requires_grad_(False)
        for block in model.transformer.h:
            attention = block.attn
            attention.c_attn = Adapted(attention.c_attn, attention.c_attn.weight.shape, 4, dropout)
        return model

    return dataclasses.replace(pretrained, model=adapted)


def llama(dropout: float = 0.1) -> Training:
    """Llama with grouped-query attention (four heads on two), rotary positions, untied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return _training(lambda: LlamaForCausalLM(config), _next_token_loss, Texts)


def bert(dropout: float = 0.1) -> Training:
    """BERT for masked language modelling: padding, and micro-batches with unequal numbers of targets."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _training(lambda: BertForMaskedLM(config), _masked_loss, MaskedTexts)


def t5(dropout: float = 0.1) -> Training:
    """T5: encoder and decoder, one embedding for both and the output, position biases shared by all layers;
    computes its own loss from `labels`."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=3 * WIDTH,
        num_layers=3,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return _training(lambda: T5ForConditionalGeneration(config), _own_loss, Pairs)


def vit(dropout: float = 0.1) -> Training:
    """ViT: patches by convolution, a class token that is expanded and joined to them."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        image_size=PICTURE,
        patch_size=4,
        num_labels=CLASSES,
    )
    return _training(lambda: ViTForImageClassification(config), _class_loss, Pictures)


def resnet(dropout: float = 0.1) -> Training:
    """`examples/resnet`, narrower: convolutions with batch norm, whose running statistics are state."""
    module = example("resnet")
    return dataclasses.replace(
        module.build(), model=lambda: module.ResNet(widths=(4, 8), blocks=2, dropout=dropout)
    )


def moe(dropout: float = 0.1) -> Training:
    """`examples/moe`, narrower: routing by top-k, and a second output that each block adds to."""
    module = example("moe")
    return dataclasses.replace(
        module.build(), model=lambda: module.MixtureGPT(width=WIDTH, layers=3, dropout=dropout)
    )


ZOO: Mapping[str, Callable[[float], Training]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "moe": moe,
    "plain_cnn": plain_cnn,
    "vgg16": vgg16,
    "densenet": densenet,
    "lstm": lstm,
    "dlrm": dlrm,
    "lora": lora,
    "mean_teacher": mean_teacher,
}


def by_sgd(entry: str) -> Training:
    """`ZOO[entry]` without dropout, by SGD with momentum, for comparisons in floating point.

    Adam divides a gradient by its own size: where it is zero but for rounding (an attention's key bias has
    none, by mathematics), noise of 1e-10 would become a step of full length.
    """
    return dataclasses.replace(
        ZOO[entry](0.0), optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9)
    )


def example(name: str) -> Any:
    """The module `train` of an example; all have that name, and none is installed under another."""
    path = Path(__file__).parents[2] / "examples" / name / "train.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _training(
    model: Callable[[], nn.Module], loss: Callable[..., Any], dataset: Callable[[], Any]
) -> Training:
    return Training(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01),
        dataset=dataset,
        schedule=lambda step: min(1.0, (step + 1) / 3),
        clip_grad_norm=1.0,
    )


def _row(index: int, length: int = LENGTH) -> Tensor:
    """Counting up in steps that depend on the sample; 0 to 2 are kept for special tokens."""
    return 3 + (torch.arange(length) * (index % 7 + 1) + index) % (VOCABULARY - 3)


class Texts:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Batch:
        row = _row(index, LENGTH + 1)
        return {"input_ids": row[:-1], "targets": row[1:]}


class MaskedTexts:
    """A quarter of the tokens of a text of its own length is to be guessed."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Batch:
        row, places = _row(index), torch.arange(LENGTH)
        inside = places < LENGTH - index % 5
        guessed = (places * 5 + index) % 4 == 0
        return {
            "input_ids": torch.where(guessed, 1, row).where(inside, torch.tensor(0)),
            "attention_mask": inside.long(),
            "targets": torch.where(guessed & inside, row, _IGNORED),
        }


class Pairs:
    """The second text is the first, backwards."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Batch:
        row = _row(index)
        return {"input_ids": row, "labels": row.flip(0)[: LENGTH // 2]}


class Pictures:
    """A bright bar whose place is the class."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Batch:
        label = index % CLASSES
        picture = torch.randn(3, PICTURE, PICTURE) * 0.1
        picture[:, :, label : label + 3] += 1.0
        return {"pixel_values": picture, "targets": torch.tensor(label)}


def _next_token_loss(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())


def _masked_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    total = F.cross_entropy(output.logits.flatten(0, 1), targets, reduction="sum", ignore_index=_IGNORED)
    return total, (targets != _IGNORED).sum()


def _own_loss(output: Any, batch: Batch) -> Tensor:
    return output.loss


def _class_loss(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits, batch["targets"])
