"""Strict access to the keys of a ``config.json``: each is read, irrelevant, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specmodel.errors import ArchitectureError, brief
from specmodel.fields import Fields

WITHOUT_EFFECT = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version auto_map hidden_act
    initializer_range max_position_embeddings rms_norm_eps rope_scaling rope_theta
    rope_parameters rope_interleaved rope_type partial_rotary_factor use_cache pretraining_tp
    attention_dropout hidden_dropout resid_pdrop embd_pdrop output_router_logits
    router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size norm_topk_prob n_group
    topk_group topk_method scoring_func routed_scaling_factor is_llama_config
    transformers.js_config tokenizer_class
    torchscript gradient_checkpointing return_dict output_attentions output_hidden_states
    use_return_dict is_encoder_decoder finetuning_task problem_type task_specific_params
    attn_logit_softcapping final_logit_softcapping cache_implementation query_pre_attn_scalar
    rope_local_base_freq layer_norm_epsilon diversity_penalty length_penalty repetition_penalty
    encoder_no_repeat_ngram_size no_repeat_ngram_size max_length min_length num_beams
    num_beam_groups do_sample early_stopping temperature top_k top_p typical_p epsilon_cutoff
    eta_cutoff output_scores return_dict_in_generate remove_invalid_values tf_legacy_loss
    use_bfloat16 is_decoder add_cross_attention pruned_heads prefix bad_words_ids suppress_tokens
    exponential_decay_length_penalty cross_attention_hidden_size
    num_logits_to_keep logits_to_keep max_sequence_length model_max_length tensor_parallel_size
    chunk_size_feed_forward attn_implementation use_flash_attn num_return_sequences
    """.split()
)
"""Keys that change no count and no cost."""

_WITHOUT_EFFECT = re.compile(
    r"_.*|unsloth.*|(id2label|label2id)"
    r"|(bos|eos|pad|sep|unk|cls|mask|decoder_start|image|video|vision_\w+)_token_id"
    r"|((attention|attn|hidden|resid|embd|mlp|classifier|activation|ffn)_)?dropout(_prob|_p)?"
)


class Keys(Fields):
    """The keys of one description, remembering which were read.

    Parameters
    ----------
    values : mapping
        The parsed JSON object.
    where : str
        File or preset, for errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values, where, fault=ArchitectureError)

    def refuse_unread(self) -> None:
        """Raise for keys that were neither read nor known to have no effect."""
        for key, value in self.values.items():
            if value is None or value is False:
                continue  # as good as absent
            if not (key in self._read or key in WITHOUT_EFFECT or _WITHOUT_EFFECT.fullmatch(key)):
                kind = self.values.get("model_type")
                of = "" if kind is None else f" for model_type {brief(kind)}"
                raise self.error(
                    brief(key).strip("'"), f"unknown key{of}: its effect on cost is not known"
                )
