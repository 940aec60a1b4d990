"""Every architecture of transformers whose default config can be made tiny by the names of its fields."""

from __future__ import annotations

import os
from typing import Any

import torch
from makara.worker import Training
from torch import Tensor, nn

from . import integers, numbers, own_loss, refuse_large, training_of

os.environ["HF_HUB_OFFLINE"] = "1"  # a config is all that is needed; nothing is looked up

VOCABULARY, LENGTH, PICTURE, CLASSES = 64, 8, 32, 3
_TASKS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_SIZES: dict[int, str] = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_kv_heads num_local_experts num_experts num_experts_per_tok "
    "n_routed_experts state_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "mamba_n_heads patch_size",
    8: "head_dim d_kv attention_head_size kv_channels qk_rope_head_dim v_head_dim qk_nope_head_dim "
    "rotary_dim",
    16: "embedding_size kv_lora_rank q_lora_rank moe_intermediate_size time_step_rank",
    32: "hidden_size n_embd d_model dim word_embed_proj_dim image_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size hidden_dim "
    "moe_ffn_hidden_size shared_expert_intermediate_size block_ff_dim",
    VOCABULARY: "vocab_size max_position_embeddings n_positions n_ctx max_target_positions",
    CLASSES: "num_labels",
    0: "pad_token_id decoder_start_token_id layerdrop encoder_layerdrop decoder_layerdrop",
    1: "bos_token_id",
}
_STAGES = {
    "depths layers num_blocks layer_repeats": 0,
    "hidden_sizes embed_dims dims widths": 16,
}
"""Fields with an entry a stage: one layer each, or widths that grow by so much."""


def names() -> list[str]:
    from transformers.models.auto import modeling_auto

    return [
        f"{task}:{model_type}"
        for task, mapping in _TASKS.items()
        for model_type, found in getattr(modeling_auto, mapping).items()
        if isinstance(found, str)
    ]


def training(name: str) -> Training:
    task, model_type = name.split(":")
    config, kind = tiny_config(model_type), class_of(task, model_type)
    tokens = integers(VOCABULARY, LENGTH)

    def model() -> nn.Module:
        return kind(config)

    with torch.device("meta"):
        refuse_large(model())
    if task == "ImageClassification":
        side = getattr(config, "image_size", PICTURE)
        side = side if isinstance(side, int) else PICTURE
        return training_of(model, own_loss, pixel_values=numbers(3, side, side), labels=_class)
    labels = {"SequenceClassification": _class, "TokenClassification": lambda: tokens() % CLASSES}
    return training_of(model, own_loss, input_ids=tokens, labels=labels.get(task, tokens))


def _class() -> Tensor:
    return torch.randint(CLASSES, ())


def class_of(task: str, model_type: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    return getattr(transformers, getattr(modeling_auto, _TASKS[task])[model_type])


def tiny_config(model_type: str) -> Any:
    """The default config of an architecture with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    return kind(**_smaller(kind()))


def _smaller(config: Any) -> dict[str, Any]:
    """Small values of the fields that `config` has."""
    given: dict[str, Any] = {"eos_token_id": 2}
    for size, fields in _SIZES.items():
        for name in fields.split():
            own = getattr(config, name, None)
            if (own is not None and not isinstance(own, list | dict)) or name.endswith("_token_id"):
                given[name] = size
    for fields, growth in _STAGES.items():
        for name in fields.split():
            own = getattr(config, name, None)
            if isinstance(own, list | tuple):
                given[name] = [growth * (stage + 1) or 1 for stage in range(len(own))]
    if isinstance(getattr(config, "embed_dim", None), int):
        given["embed_dim"] = 16 if hasattr(config, "depths") else 32
    if getattr(config, "layer_types", None):
        given["layer_types"] = config.layer_types[:2]
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            given[name] = {**part.to_dict(), **_smaller(part)}
    return given
