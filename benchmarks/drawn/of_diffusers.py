"""Denoisers and autoencoders of diffusers, tiny."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor

from . import integers, numbers, training_of

_SIDE = 8
_UNET: dict[str, Any] = dict(
    sample_size=_SIDE,
    in_channels=2,
    out_channels=2,
    block_out_channels=(8, 8),
    norm_num_groups=4,
    layers_per_block=1,
)
_ATTENTION: dict[str, Any] = dict(num_attention_heads=2, attention_head_dim=8)
_PATCHES: dict[str, Any] = dict(
    _ATTENTION, in_channels=2, out_channels=2, num_layers=2, sample_size=_SIDE, patch_size=2
)
_CROSS_BLOCKS: dict[str, Any] = dict(
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
_picture = numbers(2, _SIDE, _SIDE)
_text = numbers(4, 8)
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "UNet2DModel": (
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        | {"attention_head_dim": 4},
        {"sample": _picture},
    ),
    "UNet2DConditionModel": (
        {**_UNET, **_CROSS_BLOCKS, "attention_head_dim": 4, "cross_attention_dim": 8},
        {"sample": _picture, "encoder_hidden_states": _text},
    ),
    "UNet1DModel": (
        dict(
            sample_size=16,
            in_channels=2,
            out_channels=2,
            extra_in_channels=16,
            block_out_channels=(16, 16, 16),
        ),
        {"sample": numbers(2, 16)},
    ),
    "DiTTransformer2DModel": (
        {**_PATCHES, "num_embeds_ada_norm": 10, "norm_num_groups": 2},
        {"hidden_states": _picture, "class_labels": integers(10)},
    ),
    "Transformer2DModel": (
        {**_ATTENTION, "in_channels": 4, "num_layers": 2, "norm_num_groups": 2, "cross_attention_dim": 8},
        {"hidden_states": numbers(4, _SIDE, _SIDE), "encoder_hidden_states": _text},
    ),
    "PixArtTransformer2DModel": (
        {**_PATCHES, "caption_channels": 8, "cross_attention_dim": 16, "norm_num_groups": 2}
        | {"use_additional_conditions": False},
        {"hidden_states": _picture, "encoder_hidden_states": _text},
    ),
    "SD3Transformer2DModel": (
        {**_PATCHES, "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8},
        {"hidden_states": _picture, "encoder_hidden_states": _text, "pooled_projections": numbers(8)},
    ),
    "AuraFlowTransformer2DModel": (
        dict(
            _ATTENTION, in_channels=2, out_channels=2, sample_size=_SIDE, patch_size=2, pos_embed_max_size=16
        )
        | dict(num_mmdit_layers=1, num_single_dit_layers=1, joint_attention_dim=8, caption_projection_dim=16),
        {"hidden_states": _picture, "encoder_hidden_states": _text},
    ),
    "UVit2DModel": (
        dict(
            hidden_size=16,
            cond_embed_dim=8,
            encoder_hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        | dict(
            block_out_channels=16, block_num_heads=2, intermediate_size=32, codebook_size=16, vocab_size=17
        )
        | dict(micro_cond_embed_dim=8, in_channels=16, sample_size=_SIDE),
        {
            "input_ids": integers(16, _SIDE, _SIDE),
            "encoder_hidden_states": _text,
            "pooled_text_emb": numbers(8),
            "micro_conds": numbers(8),
        },
    ),
    "PriorTransformer": (
        dict(_ATTENTION, num_layers=2, embedding_dim=8, num_embeddings=4, additional_embeddings=4),
        {"hidden_states": numbers(8), "proj_embedding": numbers(8), "encoder_hidden_states": _text},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 2},
        {"sample": numbers(3, _SIDE, _SIDE)},
    ),
    "AutoencoderTiny": (
        dict(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), latent_channels=2)
        | dict(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        {"sample": numbers(3, _SIDE, _SIDE)},
    ),
    "VQModel": (
        dict(
            block_out_channels=(8,),
            norm_num_groups=4,
            latent_channels=2,
            num_vq_embeddings=8,
            sample_size=_SIDE,
        ),
        {"sample": numbers(3, _SIDE, _SIDE)},
    ),
    "AsymmetricAutoencoderKL": (
        dict(
            down_block_out_channels=(8,),
            up_block_out_channels=(8,),
            norm_num_groups=4,
            latent_channels=2,
        ),
        {"sample": numbers(3, _SIDE, _SIDE)},
    ),
}
_TIMELESS = ("Autoencoder", "VQ", "UVit", "Asymmetric")


def names() -> list[str]:
    return list(_MODELS)


def training(name: str) -> Training:
    import diffusers

    settings, entries = _MODELS[name]
    kind: Any = getattr(diffusers, name)
    if not name.startswith(_TIMELESS):
        entries = {**entries, "timestep": integers(100)}
    return training_of(lambda: kind(**settings), _denoising, **entries)


def _denoising(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the default output holds, pulled towards zero."""
    values = output if isinstance(output, Tensor) else next(iter(output.values()))
    return F.mse_loss(values.float(), torch.zeros_like(values.float()))
