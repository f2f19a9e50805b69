"""Small models of transformers, timm and diffusers with random weights, a family each.

They are for `scripts/replaced_models` and its tests. No weights are loaded. A family that the
installed version of its library does not have, or builds in another way, says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# What any of transformers' configurations may take, so that its model is small.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 16),
    **{"qk_rope_head_dim": 16, "q_lora_rank": 32, "global_head_dim": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **{"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 0, "type_vocab_size": 2, "state_size": 8, "image_size": 32},
    **{"patch_size": 8, "num_mel_bins": 16, "time_step_rank": 4, "sliding_window": 16},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("attention_dropout", "activation_dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"), 0.0),
    **dict.fromkeys(("drop_path_rate", "layerdrop", "drop_path"), 0.0),
}  # fmt: skip


class NotBuiltError(Exception):
    """A family that the installed libraries do not have, or not so."""


class Family(NamedTuple):
    """A model, and what runs it.

    Attributes:
        library: Where it is from.
        name: Of its class, or timm's of the model.
        settings: Beside the usual ones.
        kind: Of its inputs, a key of `_INPUTS`; None: it is only looked at.
    """

    library: str
    name: str
    settings: Mapping[str, Any] = {}
    kind: str | None = "tokens"

    def build(self) -> nn.Module:
        """The model, in f32.

        Raises:
            NotBuiltError: The message says why not.
        """
        try:
            torch.manual_seed(0)
            model = _BUILDERS[self.library](self)
        except Exception as error:  # of libraries, and their versions, anything
            said = (str(error).strip().splitlines() or [""])[0]
            raise NotBuiltError(f"{type(error).__name__}: {said[:100]}") from error
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                nn.init.normal_(parameter, float(parameter.detach().mean()), 0.2)
        return model.eval()

    def run(self, model: nn.Module) -> Tensor:
        """An output of the model, for inputs that are the same each time."""
        assert self.kind is not None
        torch.manual_seed(2)
        dtype = next(model.parameters()).dtype
        given = {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in _INPUTS[self.kind]().items()
        }
        return _first(model(**given) if self.library != "timm" else model(*given.values()))


def _first(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state", "sample"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    return output if isinstance(output, Tensor) else _first(output[0])


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 100, (2, 9))}


_INPUTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "tokens": _tokens,
    "both": lambda: {**_tokens(), "decoder_input_ids": torch.randint(3, 100, (2, 5))},
    "image": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    "image of 64": lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    "clip": lambda: {**_tokens(), "pixel_values": torch.randn(2, 3, 32, 32)},
    "mel": lambda: {
        "input_features": torch.randn(2, 16, 128),
        "decoder_input_ids": torch.randint(3, 100, (2, 5)),
    },
    "dit": lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 2]),
        "class_labels": torch.tensor([0, 1]),
    },
    "crossed": lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "timestep": torch.tensor([1, 2]),
    },
    "unet": lambda: {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": 1,
        "encoder_hidden_states": torch.randn(2, 5, 32),
    },
}


def small_config(cls: type, settings: Mapping[str, Any]) -> Any:
    """A configuration with the small sizes that its class knows."""
    known = {*inspect.signature(cls).parameters}
    known |= {name for each in cls.__mro__ for name in getattr(each, "__annotations__", {})}
    return cls(**{**{name: v for name, v in _SMALL.items() if name in known}, **settings})


def _of_transformers(family: Family) -> nn.Module:
    transformers = importlib.import_module("transformers")
    cls = getattr(transformers, family.name)
    config_class, settings = cls.config_class, dict(family.settings)
    for part, of_part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(settings.get(part), dict) and of_part.__name__ != "AutoConfig":
            settings[part] = small_config(of_part, settings[part]).to_dict()
    config = small_config(config_class, settings)
    config._attn_implementation = config._experts_implementation = "eager"
    model: nn.Module = cls(config)
    return model


def _of_timm(family: Family) -> nn.Module:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(
        family.name, pretrained=False, num_classes=5, **family.settings
    )
    return model


def _of_diffusers(family: Family) -> nn.Module:
    diffusers = importlib.import_module("diffusers")
    model: nn.Module = getattr(diffusers, family.name)(**family.settings)
    return model


_BUILDERS: Mapping[str, Callable[[Family], nn.Module]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
    "diffusers": _of_diffusers,
}
_TEXT = (
    "BertModel", "RobertaModel", "DistilBertModel", "AlbertModel", "ElectraModel",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    "FalconForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM",
    "CohereForCausalLM", "GraniteForCausalLM", "NemotronForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM", "MptForCausalLM", "MambaForCausalLM",
    "FalconMambaForCausalLM", "GlmForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
_DIT = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2},
    "sample_size": 8,
}

FAMILIES: tuple[Family, ...] = (
    *(Family("transformers", name) for name in _TEXT),
    Family("transformers", "DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
    Family("transformers", "ModernBertModel", {"global_attn_every_n_layers": 2}),
    Family("transformers", "DebertaV2Model"),
    Family("transformers", "Llama4ForCausalLM", {
        "intermediate_size_mlp": 96, "no_rope_layers": [1, 1], "attention_chunk_size": 32}),
    Family("transformers", "Gemma3nForCausalLM", {
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [96, 96]}),
    Family("transformers", "T5ForConditionalGeneration", kind="both"),
    Family("transformers", "BartModel", kind="both"),
    Family("transformers", "WhisperModel", kind="mel"),
    Family("transformers", "ViTModel", kind="image"),
    Family("transformers", "Dinov2Model", kind="image"),
    Family("transformers", "CLIPModel", {"text_config": {}, "vision_config": {}}, None),
    Family("transformers", "SwinModel", {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
                                         "patch_size": 4, "window_size": 4}, "image"),
    Family("transformers", "ConvNextModel", {"hidden_sizes": [8, 16, 24, 32],
                                             "depths": [1, 1, 1, 1], "patch_size": 4}, "image"),
    Family("transformers", "ConvNextV2Model", {"hidden_sizes": [8, 16, 24, 32],
                                               "depths": [1, 1, 1, 1], "patch_size": 4}, "image"),
    Family("timm", "vit_tiny_patch16_224", {"img_size": 32, "depth": 2}, "image"),
    Family("timm", "convnext_atto", {}, "image"),
    Family("timm", "convnextv2_atto", {}, "image"),
    Family("timm", "eva02_tiny_patch14_224", {"img_size": 28, "depth": 2}, None),
    Family("timm", "swin_tiny_patch4_window7_224", {
        "img_size": 32, "window_size": 4, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16},
        "image"),
    Family("diffusers", "DiTTransformer2DModel", {**_DIT, "num_embeds_ada_norm": 5}, "dit"),
    Family("diffusers", "PixArtTransformer2DModel", {
        **_DIT, "cross_attention_dim": 32, "caption_channels": 32}, None),
    Family("diffusers", "SD3Transformer2DModel", {
        **_DIT, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 32, "qk_norm": "rms_norm"}, None),
    Family("diffusers", "FluxTransformer2DModel", {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8)}, None),
    Family("diffusers", "UNet2DConditionModel", {
        "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8,
        "norm_num_groups": 8}, "unet"),
)  # fmt: skip


def built() -> Iterator[tuple[Family, nn.Module | NotBuiltError]]:
    """Each family, and its model or why there is none."""
    for family in FAMILIES:
        try:
            yield family, family.build()
        except NotBuiltError as error:
            yield family, error
