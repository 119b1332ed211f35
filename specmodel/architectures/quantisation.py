"""What a checkpoint says of its quantisation: formats, groups, excluded modules, KV cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from specmodel.architectures.exclusions import exclude
from specmodel.architectures.families import as_dtype
from specmodel.architectures.keys import Keys
from specmodel.architectures.records import Architecture
from specmodel.dtypes import KV_DTYPES, Quantisation, default_quantisation
from specmodel.errors import ArchitectureError, brief

_REQUIRED = object()
_COLUMN = 2**40  # a group longer than any column: one scale for each


def with_quantisation(architecture: Architecture, keys: Keys) -> Architecture:
    """Return the model in the formats that ``quantization_config`` states.

    Raises
    ------
    ArchitectureError
        Naming the key or module that is not understood.
    """
    config = keys.raw("quantization_config", None)
    if config is None:
        return architecture
    where = f"{keys.where}: quantization_config"
    if not isinstance(config, dict):
        raise ArchitectureError(f"{where}: must be an object; got {brief(config)}")
    quant = Keys(config, where)
    method = quant.text("quant_method")
    readers = {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
    }
    if method not in readers:
        raise quant.error(
            "quant_method", f"{brief(method)} is not supported; {', '.join(readers)} are"
        )
    quantisation = readers[method](quant)
    excluded = [*_names(quant, "modules_to_not_convert"), *_names(quant, "ignore"),
                *_names(quant, "exclude_modules")]  # fmt: skip
    kv = _kv_dtype(quant)
    for source in (keys, quant):
        source.raw("expert_dtype", None)
    quant.refuse_unread()
    result = replace(architecture, quantisation=quantisation, kv_dtype=kv or architecture.kv_dtype)
    result = exclude(result, excluded, partial(quant.error, "excluded modules"))
    return _with_experts(result, keys, quant)


def _with_experts(model: Architecture, keys: Keys, quant: Keys) -> Architecture:
    """Return the model with its routed experts in ``expert_dtype``, where the file states one.

    ``fp4`` has an 8-bit scale for each 32 weights (vLLM, ``models/deepseek_v4/amd/mtp.py``:
    they run as MXFP4; read 2026-11-29).
    """
    stated = keys.values.get("expert_dtype") or quant.values.get("expert_dtype")
    main = model.quantisation
    if stated is None or main is None or stated == main.dtype:
        return model
    if stated != "fp4":
        raise keys.error("expert_dtype", f"must be fp4 or {main.dtype}; got {brief(stated)}")
    if "experts" not in main.roles:
        raise keys.error("expert_dtype", "contradicts the excluded modules")
    return replace(
        model,
        quantisation=replace(main, roles=main.roles - {"experts"}),
        expert_quantisation=replace(default_quantisation("mxfp4"), roles=frozenset({"experts"})),
    )


def from_hf_quant_config(keys: Keys) -> dict[str, Any]:
    """Translate a ``hf_quant_config.json`` (ModelOpt) into a ``quantization_config``."""
    keys.raw("producer", None)
    inner = keys.raw("quantization")
    if not isinstance(inner, dict):
        raise keys.error("quantization", f"must be an object; got {brief(inner)}")
    return {"quant_method": "modelopt", **inner}


# -- formats -------------------------------------------------------------------------------------


def _fp8(quant: Keys) -> Quantisation:
    for key in ("activation_scheme", "fmt", "scale_fmt"):
        quant.raw(key, None)
    return Quantisation(dtype="fp8", block=_block(quant, "weight_block_size"))


def _block(quant: Keys, key: str) -> tuple[int, int] | None:
    block = quant.raw(key, None)
    if block is None:
        return None
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in block)
    ):
        raise quant.error(key, f"must be two whole numbers > 0; got {brief(block)}")
    return block[0], block[1]


def _group_size(quant: Keys, key: str, default: Any = _REQUIRED) -> int:
    """Return the weights that share a scale; -1 and null are a whole column."""
    stated = quant.raw(key) if default is _REQUIRED else quant.raw(key, None)
    if stated is None or stated == -1:
        return _COLUMN
    return quant.whole(key)


def _mxfp4(quant: Keys) -> Quantisation:
    return replace(default_quantisation("mxfp4"), roles=frozenset({"experts"}))


def _modelopt(quant: Keys) -> Quantisation:
    for key in ("producer", "config_groups", "quant_method"):
        quant.raw(key, None)
    algorithm = quant.text("quant_algo")
    if (group := quant.whole_or_none("group_size", None)) not in (None, 16) and (
        algorithm == "NVFP4"
    ):
        raise quant.error("group_size", f"must be 16; got {group}")
    if algorithm == "FP8":
        return Quantisation(dtype="fp8")
    if algorithm == "NVFP4":
        return default_quantisation("nvfp4")
    raise quant.error("quant_algo", f"{brief(algorithm)} is not supported; FP8 and NVFP4 are")


def _compressed(quant: Keys) -> Quantisation:
    for key in ("format", "quantization_status", "global_compression_ratio", "version",
                "sparsity_config", "transform_config"):  # fmt: skip
        if quant.raw(key, None) and key in ("sparsity_config", "transform_config"):
            raise quant.error(key, "is not supported")
    groups = quant.raw("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise quant.error("config_groups", "must hold one group")
    (group,) = groups.values()
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise quant.error("config_groups", "must describe weights")
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise quant.error("config_groups", f"targets {brief(group['targets'])} are not supported")
    unknown = set(group) - {
        "weights",
        "input_activations",
        "output_activations",
        "targets",
        "format",
    }
    if unknown or group.get("output_activations") is not None:
        raise quant.error(
            "config_groups", f"{sorted(unknown) or 'output_activations'}: not supported"
        )
    weights = Keys(group["weights"], f"{quant.where}: config_groups: weights")
    result = _compressed_weights(weights, str(group.get("format") or quant.values.get("format")))
    weights.refuse_unread()
    return replace(result, weight_only=result.weight_only or group.get("input_activations") is None)


def _compressed_weights(weights: Keys, stored: str) -> Quantisation:
    """Return the format of weights that are kept so, whatever activations are.

    Four-bit weights count as multiplied in the activation format, W4A8 kernels included.
    """
    for key in ("actorder", "dynamic", "observer", "observer_kwargs", "strategy", "zp_dtype"):
        weights.raw(key, None)
    bits, kind = weights.whole("num_bits"), weights.text("type")
    size = _group_size(weights, "group_size", _COLUMN)
    scale, symmetric = weights.raw("scale_dtype", None), weights.flag("symmetric", True)
    block = _block(weights, "block_structure")
    if (kind, bits) == ("int", 4):
        return replace(
            default_quantisation("int4"),
            group=size,
            scale_bytes=2.0 if symmetric else 2.5,
        )
    if (kind, bits) == ("float", 4):
        micro = stored.startswith("mxfp4") or scale == "torch.uint8"
        default = default_quantisation("mxfp4" if micro else "nvfp4")
        if size not in (_COLUMN, default.group):
            raise weights.error("group_size", f"must be {default.group}; got {size}")
        return default
    if bits == 8 and kind in ("int", "float"):
        dtype = "int8" if kind == "int" else "fp8"
        if size < _COLUMN:
            width = 1.0 if scale == "torch.uint8" else 2.0
            return Quantisation(dtype=dtype, group=size, scale_bytes=width + (not symmetric))
        return Quantisation(dtype=dtype, block=block)
    raise weights.error("num_bits", f"{bits}-bit {kind} weights are not supported")


def _awq(quant: Keys) -> Quantisation:
    for key in ("version", "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len",
                "exllama_config"):  # fmt: skip
        quant.raw(key, None)
    return _grouped(quant, zero_points=quant.flag("zero_point", True))


def _gptq(quant: Keys) -> Quantisation:
    for key in ("desc_act", "sym", "damp_percent", "static_groups", "true_sequential", "dataset",
                "model_name_or_path", "model_file_base_name", "checkpoint_format", "meta",
                "use_exllama", "version", "tokenizer", "exllama_config", "max_input_length",
                "cache_block_outputs", "module_name_preceding_first_block", "model_seqlen",
                "block_name_to_quantize", "batch_size", "pad_token_id",
                "use_cuda_fp16", "pack_dtype"):  # fmt: skip
        quant.raw(key, None)
    return _grouped(quant, zero_points=True)  # stored whether used or not


def _grouped(quant: Keys, *, zero_points: bool) -> Quantisation:
    bits = quant.whole("bits")
    size = _group_size(quant, "group_size")
    if bits == 4:
        scale = 2.5 if zero_points else 2.0
        return replace(default_quantisation("int4"), group=size, scale_bytes=scale)
    if bits == 8:
        return Quantisation(dtype="int8", group=size, scale_bytes=3.0, weight_only=True)
    raise quant.error("bits", f"must be 4 or 8; got {bits}")


def _kv_dtype(quant: Keys) -> str | None:
    scheme = quant.raw("kv_cache_scheme", None)
    if scheme is not None and not isinstance(scheme, dict):
        raise quant.error("kv_cache_scheme", f"must be an object; got {brief(scheme)}")
    if scheme is not None:
        if scheme.get("num_bits") != 8:
            raise quant.error("kv_cache_scheme", f"must be of 8 bits; got {brief(scheme)}")
        if scheme.get("type") not in ("float", "int"):
            raise quant.error("kv_cache_scheme", f"must say its type; got {brief(scheme)}")
        return "fp8" if scheme["type"] == "float" else "int8"
    stated = quant.raw("kv_cache_dtype", None) or quant.raw("kv_cache_quant_algo", None)
    quant.raw("kv_cache_quant_algo", None)
    if stated is None or stated == "auto":
        return None
    dtype = as_dtype(quant, "kv_cache_dtype", stated)
    if dtype not in KV_DTYPES:
        raise quant.error("kv_cache_dtype", f"must be one of {', '.join(KV_DTYPES)}; got {dtype}")
    return dtype


# -- excluded modules ----------------------------------------------------------------------------


def _names(quant: Keys, key: str) -> list[str]:
    names = quant.raw(key, None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise quant.error(key, f"must be a list of module names; got {brief(names)}")
    return names
