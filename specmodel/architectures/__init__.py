"""Model records, the ``config.json`` reader, draft heads and named models."""

from specmodel.architectures.compressed import CompressedAttention
from specmodel.architectures.config import from_dict, is_record, read_config
from specmodel.architectures.families import NO_DTYPE
from specmodel.architectures.heads import (
    block_head,
    eagle3_head,
    eagle_head,
    mtp_head,
    peagle_head,
)
from specmodel.architectures.parts import (
    MLP,
    Attention,
    LatentAttention,
    Linear,
    MoE,
    Recurrent,
)
from specmodel.architectures.presets import model_names, normalise
from specmodel.architectures.records import Architecture, Fusion, Layer
from specmodel.architectures.serialise import from_json, from_yaml, to_json, to_yaml
from specmodel.architectures.spellings import find_model, load_model

__all__ = [
    "MLP",
    "NO_DTYPE",
    "Architecture",
    "Attention",
    "CompressedAttention",
    "Fusion",
    "LatentAttention",
    "Layer",
    "Linear",
    "MoE",
    "Recurrent",
    "block_head",
    "eagle3_head",
    "eagle_head",
    "find_model",
    "from_dict",
    "from_json",
    "from_yaml",
    "is_record",
    "load_model",
    "model_names",
    "mtp_head",
    "normalise",
    "peagle_head",
    "read_config",
    "to_json",
    "to_yaml",
]
