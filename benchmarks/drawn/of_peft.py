"""Models of transformers in each wrapper of peft."""

from __future__ import annotations

from typing import Any

from makara.worker import Training
from torch import nn

from . import of_transformers, own_loss, training_of

_BASES = {
    "llama": "CausalLM",
    "gpt2": "CausalLM",
    "opt": "CausalLM",
    "qwen2": "CausalLM",
    "bert": "SequenceClassification",
    "t5": "Seq2SeqLM",
    "vit": "ImageClassification",
}
_TASK_TYPES = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS", "Seq2SeqLM": "SEQ_2_SEQ_LM"}
_METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 2},
    "LoraConfig, DoRA": {"r": 2, "use_dora": True},
    "LoraConfig, dropout": {"r": 2, "lora_dropout": 0.1},
    "AdaLoraConfig": {"total_step": 100},
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "OFTConfig": {"oft_block_size": 4, "r": 0},
    "BOFTConfig": {"boft_block_size": 4},
    "HRAConfig": {"r": 2},
    "VeraConfig": {"r": 2},
    "FourierFTConfig": {"n_frequency": 8},
    "LNTuningConfig": {},
    "IA3Config": {"feedforward_modules": []},
    "PromptTuningConfig": {"num_virtual_tokens": 2},
    "PrefixTuningConfig": {"num_virtual_tokens": 2},
    "PromptEncoderConfig": {"num_virtual_tokens": 2, "encoder_hidden_size": 16},
}
_OF_PROMPTS = ("Pro", "Pre")
_TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "opt": ["q_proj", "v_proj"],
    "qwen2": ["q_proj", "v_proj"],
    "gpt2": ["c_proj"],
    "bert": ["query", "value"],
    "t5": ["q", "v"],
    "vit": ["q_proj", "v_proj"],
}


def names() -> list[str]:
    """Prompts need a task; other methods are drawn with and without one."""
    return [
        f"{method} on {base}{suffix}"
        for method in _METHODS
        for base, task in _BASES.items()
        for suffix in ("", ", no task")
        if (suffix or task in _TASK_TYPES) and not (suffix and method.startswith(_OF_PROMPTS))
    ]


def training(name: str) -> Training:
    method, _, rest = name.partition(" on ")
    base, _, without = rest.partition(", ")
    plain = of_transformers.training(f"{_BASES[base]}:{base}")
    settings = dict(_METHODS[method])
    if not without:
        settings["task_type"] = _TASK_TYPES[_BASES[base]]
    if not method.startswith(_OF_PROMPTS):
        settings["target_modules"] = (
            ["layer_norm", "LayerNorm", "layernorm"] if method[:2] == "LN" else _TARGETS[base]
        )

    def model() -> nn.Module:
        import peft

        config: Any = getattr(peft, method.partition(",")[0])
        return peft.get_peft_model(plain.model(), config(**settings))

    samples: Any = plain.dataset()
    return training_of(model, own_loss, **samples.entries)
