"""Small models of transformers, timm and diffusers with random weights, a family each.

They are for `scripts/replaced_models` and its tests. No weights are loaded. A family that the
installed version of its library does not have, or builds in another way, says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from model_inputs import INPUTS
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
        kind: Of its inputs, a key of `INPUTS`.
        variant: What sets it apart from another of this name.
    """

    library: str
    name: str
    settings: Mapping[str, Any] = {}
    kind: str = "tokens"
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.name} with {self.variant}" if self.variant else self.name

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
        torch.manual_seed(2)
        dtype = next(model.parameters()).dtype
        given = {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in INPUTS[self.kind]().items()
        }
        return _first(model(**given) if self.library != "timm" else model(*given.values()))


def _first(output: Any) -> Tensor:
    for name in ("logits", "logits_per_image", "last_hidden_state", "sample"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    return output if isinstance(output, Tensor) else _first(output[0])


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
    "BertModel", "RobertaModel", "XLMRobertaModel", "DistilBertModel", "AlbertModel",
    "ElectraModel", "MPNetModel", "LongformerModel", "BigBirdModel", "XLNetModel",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTBigCodeForCausalLM", "OPTForCausalLM",
    "BloomForCausalLM", "FalconForCausalLM", "PersimmonForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "PhimoeForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "OlmoeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "NemotronForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM", "MptForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM",
    "GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "SmolLM3ForCausalLM",
    "GptOssForCausalLM", "Exaone4ForCausalLM", "Ernie4_5ForCausalLM", "HunYuanDenseV1ForCausalLM",
    "Lfm2ForCausalLM", "ModernBertDecoderForCausalLM", "NemotronHForCausalLM",
)  # fmt: skip
_BOTH = (
    "T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration",
    "BartModel", "MBartModel", "PegasusModel", "MarianModel", "M2M100Model",
)  # fmt: skip
_MLA = {"num_key_value_heads": 4}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_SOUND = {
    **{"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    "num_feat_extract_layers": 2,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
_DIT = {**_HEADS, "num_layers": 2, "sample_size": 8}
_FLUX = {
    **_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    *(Family("transformers", name) for name in _TEXT),
    Family("transformers", "CohereForCausalLM", {"use_qk_norm": True}, variant="use_qk_norm"),
    Family("transformers", "DeepseekV2ForCausalLM", _MLA),
    Family("transformers", "DeepseekV3ForCausalLM", _MLA),
    Family("transformers", "ModernBertModel", {"global_attn_every_n_layers": 2}),
    Family("transformers", "DebertaV2Model"),
    Family("transformers", "GPTJForCausalLM", {"rotary_dim": 8}),
    Family("transformers", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    Family("transformers", "Llama4ForCausalLM", {
        "intermediate_size_mlp": 96, "no_rope_layers": [1, 1], "attention_chunk_size": 32}),
    Family("transformers", "Gemma3nForCausalLM", {
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [96, 96]}),
    Family("transformers", "Gemma4ForCausalLM", {
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"]}),
    Family("transformers", "Qwen3NextForCausalLM", _LINEAR),
    Family("transformers", "Qwen3_5ForCausalLM", _LINEAR),
    Family("transformers", "Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 16, "n_groups": 2}),
    Family("transformers", "BambaForCausalLM", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}),
    Family("transformers", "JambaForCausalLM", {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2}),
    *(Family("transformers", name, kind="both") for name in _BOTH),
    Family("transformers", "WhisperModel", kind="mel"),
    Family("transformers", "Wav2Vec2Model", _SOUND, "sound"),
    Family("transformers", "HubertModel", {**_SOUND, "feat_extract_norm": "layer"}, "sound"),
    *(Family("transformers", name, kind="image")
      for name in ("ViTModel", "DeiTModel", "BeitModel", "Dinov2Model", "DINOv3ViTModel")),
    *(Family("transformers", name, {"text_config": {}, "vision_config": {}}, "clip")
      for name in ("CLIPModel", "SiglipModel", "BlipModel")),
    Family("transformers", "SwinModel", {**_WINDOWS, "patch_size": 4}, "image"),
    Family("transformers", "Swinv2Model", {**_WINDOWS, "patch_size": 4}, "image"),
    Family("transformers", "SegformerModel", {
        **_STAGES, "num_attention_heads": [1, 1, 2, 2], "num_encoder_blocks": 4}, "image of 64"),
    Family("transformers", "ConvNextModel", {**_STAGES, "patch_size": 4}, "image"),
    Family("transformers", "ConvNextV2Model", {**_STAGES, "patch_size": 4}, "image"),
    Family("transformers", "DINOv3ConvNextModel", _STAGES, "image"),
    *(Family("timm", name, {"img_size": 32, "depth": 2}, "image") for name in (
        "vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch16_dinov3",
        "xcit_nano_12_p16_224")),
    *(Family("timm", name, {"img_size": 32, "depth": 2, "embed_dim": 96, "num_heads": 3}, "image")
      for name in ("beitv2_base_patch16_224", "vit_base_patch16_siglip_224")),
    Family("timm", "eva02_tiny_patch14_224", {"img_size": 28, "depth": 2}, "image of 28"),
    Family("timm", "convnext_atto", {}, "image"),
    Family("timm", "convnextv2_atto", {}, "image"),
    Family("timm", "swin_tiny_patch4_window7_224", {**_WINDOWS, "img_size": 32}, "image"),
    Family("timm", "swinv2_tiny_window8_256", {**_WINDOWS, "img_size": 64}, "image of 64"),
    Family("timm", "pvt_v2_b0", {}, "image of 64"),
    Family("timm", "edgenext_xx_small", {}, "image of 64"),
    Family("timm", "davit_tiny", {
        "embed_dims": (16, 32, 48, 64), "num_heads": (2, 2, 2, 2), "depths": (1, 1, 1, 1)},
        "image of 64"),
    Family("diffusers", "DiTTransformer2DModel", {**_DIT, "num_embeds_ada_norm": 5}, "dit"),
    Family("diffusers", "PixArtTransformer2DModel", {
        **_DIT, "cross_attention_dim": 32, "caption_channels": 32}, "pixart"),
    Family("diffusers", "SD3Transformer2DModel", {
        **_DIT, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 32, "qk_norm": "rms_norm"}, "pooled"),
    Family("diffusers", "FluxTransformer2DModel", {**_FLUX, "pooled_projection_dim": 32}, "flux"),
    Family("diffusers", "Flux2Transformer2DModel", {
        **_FLUX, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)}, "flux 2"),
    Family("diffusers", "ChromaTransformer2DModel", {
        **_FLUX, "approximator_hidden_dim": 32, "approximator_num_channels": 8,
        "approximator_layers": 1}, "chroma"),
    Family("diffusers", "QwenImageTransformer2DModel", {
        **_HEADS, "patch_size": 2, "out_channels": 1, "num_layers": 2, "joint_attention_dim": 32,
        "axes_dims_rope": (4, 4, 8)}, "qwen"),
    Family("diffusers", "SanaTransformer2DModel", {
        **_DIT, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
        "cross_attention_dim": 32, "caption_channels": 32}, "crossed"),
    Family("diffusers", "AuraFlowTransformer2DModel", {
        **_HEADS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        "crossed"),
    Family("diffusers", "Lumina2Transformer2DModel", {
        "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
        "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16,
        "axes_dim_rope": (4, 4, 8), "axes_lens": (64, 64, 64), "cap_feat_dim": 32}, "masked"),
    Family("diffusers", "WanTransformer3DModel", {
        **_HEADS, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 64,
        "num_layers": 2, "cross_attn_norm": True}, "video"),
    Family("diffusers", "HunyuanVideoTransformer3DModel", {
        **_HEADS, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 4, 8)}, "hunyuan"),
    Family("diffusers", "CogVideoXTransformer3DModel", {
        **_HEADS, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "num_layers": 2,
        "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5},
        "frames"),
    Family("diffusers", "LTXVideoTransformer3DModel", {
        **_HEADS, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 2,
        "caption_channels": 32}, "ltx"),
    Family("diffusers", "AutoencoderKLWan", {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1,
        "temperal_downsample": [False], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
        "latent video"),
    Family("diffusers", "AutoencoderKL", {
        "block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1, "norm_num_groups": 8},
        "latents"),
    Family("diffusers", "UNet2DConditionModel", {
        "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8,
        "norm_num_groups": 8}, "unet"),
)  # fmt: skip


def built(names: Collection[str] = ()) -> Iterator[tuple[Family, nn.Module | NotBuiltError]]:
    """Each family, or those of some names, and its model or why there is none."""
    for family in FAMILIES:
        if names and family.name not in names:
            continue
        try:
            yield family, family.build()
        except NotBuiltError as error:
            yield family, error
