"""Tiny models of transformers' families, saved in Hugging Face's format: what a user has in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from makara.worker import Training
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # a config is all that is needed; nothing is looked up

VOCABULARY = 64
LENGTH = 12
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
_NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _decoder(name: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**{**_SIZES, **sizes}))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _opt() -> nn.Module:
    return _decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES, **_NO_DROPOUT))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")
    }
    config = ViTConfig(**sizes, **_NO_DROPOUT, image_size=8, patch_size=4, num_labels=VOCABULARY)
    return ViTForImageClassification(config)


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "llama": lambda: _decoder("Llama", num_key_value_heads=2),
    "llama, tied": lambda: _decoder("Llama", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: _decoder("Qwen2", num_key_value_heads=2),
    "mistral": lambda: _decoder("Mistral", num_key_value_heads=2),
    "mixtral": lambda: _decoder("Mixtral", num_key_value_heads=2, num_local_experts=2),
    "gpt_neox": lambda: _decoder("GPTNeoX"),
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
}


class Folder:
    """A model saved in shards with an index, and ways to load it."""

    def __init__(self, family: str, path: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model: Any = FAMILIES[family]()
            with torch.no_grad():
                for parameter in model.parameters():  # no value is one that a new model would have
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(path, max_shard_size="20KB")
        self.kind: Any = type(model)
        self.path = path

    def load(self, **given: Any) -> nn.Module:
        """What a user's model function does."""
        return self.kind.from_pretrained(self.path, **given)

    def training(self, **given: Any) -> Training:
        """SGD, because Adam would make full steps of what is zero but for rounding."""
        return Training(
            model=lambda: self.load(**given),
            loss=_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
            dataset=_Pictures if "ViT" in self.kind.__name__ else _Texts,
        )


def plain_loop(training: Training, micro_batches: list[dict[str, Tensor]], steps: int) -> nn.Module:
    """The user's module, trained in PyTorch alone on the same micro-batches in each step."""
    model: Any = training.model()
    model.train()
    optimizer = training.optimizer(list(model.named_parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in micro_batches:
            (training.loss(model(**batch), batch) / len(micro_batches)).backward()
        optimizer.step()
    return model


def every_tensor(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return output.loss.float()


class _Texts:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = 3 + (torch.arange(LENGTH) * (index % 7 + 1) + index) % (VOCABULARY - 3)
        return {"input_ids": row, "labels": row.roll(-1)}


class _Pictures:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(index)}
