"""Weights from local files: a folder of ``config.json`` and safetensors, or a GGUF file.

Nothing is downloaded, no pickle is opened and no code of a checkpoint is run. Every tensor of the
decoder must be there once, in its shape and finite; a tensor that the decoder lacks is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.engine import gguf_files
from calibrate.engine.config import end_tokens, from_dict, to_dict
from calibrate.engine.decoder import Decoder
from calibrate.engine.tokenizers import Tokenizer, read_tokenizer
from specmodel.architectures.keys import Keys
from specmodel.errors import CheckpointError
from specmodel.files import check_input, parse_json, read_text

_MOST_NAMES = 8  # in one error
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Read = Callable[[], Tensor]
"""Reads one tensor, so that only one is held beside the decoder."""


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = torch.float32,
    device: Any = "cpu",
    tokenizer: bool = True,
) -> tuple[Decoder, Tokenizer | None]:
    """Return the decoder in a folder or GGUF file, and its tokenizer where there is one.

    Parameters
    ----------
    path : path
        Folder of ``config.json`` and ``*.safetensors`` (with an index where there are several),
        with ``tokenizer.json`` if there is one; or a ``.gguf`` file.
    dtype, device : as torch takes them
        Where the weights go; quantised ones are dequantised.
    tokenizer : bool
        False: do not look for one.

    Raises
    ------
    CheckpointError
        Naming the file and the tensors at fault.
    ArchitectureError
        Naming the key of ``config.json`` at fault.
    """
    file = Path(path)
    if file.is_dir():
        return _load_folder(file, dtype, device, tokenizer)
    check_input(file, fault=CheckpointError)
    if file.suffix in _PICKLES:
        raise CheckpointError(f"{file}: pickles can run code and are never opened")
    if file.suffix != ".gguf":
        raise CheckpointError(f"{file}: neither a folder nor a .gguf file")
    found = gguf_files.read(file)
    decoder = Decoder(found.config, dtype=dtype, device=device)
    fill(decoder, found.tensors, where=str(file))
    return decoder, found.tokenizer() if tokenizer else None


def save(path: str | os.PathLike[str], decoder: Decoder) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder that `load` reads back.

    Raises
    ------
    CheckpointError
        For scaled rotary frequencies, of which only the factors are known.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    if decoder.config.rope_factors is not None:
        raise CheckpointError(f"{folder}: scaled rotary frequencies cannot be written")
    text = json.dumps(to_dict(decoder.config), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous() for name, t in named_tensors(decoder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(text, encoding="utf-8")


def named_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return views of the decoder's weights by their names in Hugging Face checkpoints."""
    c = decoder.config
    rows = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
    found: dict[str, Tensor | None] = {"model.embed_tokens.weight": decoder.embedding}
    for i, layer in enumerate(decoder.layers):
        at = f"model.layers.{i}."
        found[at + "input_layernorm.weight"] = layer.attention_norm
        for name, view in zip("qkv", layer.qkv.split(rows), strict=True):
            found[f"{at}self_attn.{name}_proj.weight"] = view
        if layer.qkv_bias is not None:
            for name, view in zip("qkv", layer.qkv_bias.split(rows), strict=True):
                found[f"{at}self_attn.{name}_proj.bias"] = view
        found[at + "self_attn.q_norm.weight"] = layer.q_norm
        found[at + "self_attn.k_norm.weight"] = layer.k_norm
        found[at + "self_attn.o_proj.weight"] = layer.out
        found[at + "post_attention_layernorm.weight"] = layer.mlp_norm
        for name, view in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            found[f"{at}mlp.{name}_proj.weight"] = view
        found[at + "mlp.down_proj.weight"] = layer.down
    found["model.norm.weight"] = decoder.norm
    found["lm_head.weight"] = None if c.tied else decoder.head
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@torch.no_grad()  # type: ignore[untyped-decorator]
def fill(
    decoder: Decoder, tensors: Mapping[str, tuple[tuple[int, ...], Read]], *, where: str
) -> None:
    """Copy tensors, given as (shape, reader) by name, into a decoder.

    Raises
    ------
    CheckpointError
        Naming tensors that are missing, extra, of another shape, or not finite in the decoder's
        number format.
    """
    wanted = named_tensors(decoder)
    problems = []
    if missing := [name for name in wanted if name not in tensors]:
        problems.append(f"missing tensors: {_listed(missing)}")
    extra = [n for n in tensors if n not in wanted and not _harmless(n, decoder)]
    if extra:
        problems.append(f"tensors that the decoder lacks: {_listed(extra)}")
    wrong = [
        f"{name} {list(tensors[name][0])} instead of {list(view.shape)}"
        for name, view in wanted.items()
        if name in tensors and tuple(tensors[name][0]) != tuple(view.shape)
    ]
    if wrong:
        problems.append(f"tensors of another shape: {_listed(wrong)}")
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    for name, view in wanted.items():
        value = tensors[name][1]()
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise CheckpointError(f"{where}: {name}: number format {value.dtype} is not read")
        view.copy_(value)
        if not bool(torch.isfinite(view).all()):
            raise CheckpointError(f"{where}: {name}: holds NaN or infinity in {view.dtype}")
    if decoder.config.tied and "lm_head.weight" in tensors:
        head = tensors["lm_head.weight"][1]().to(decoder.embedding)
        if not torch.equal(head, decoder.embedding):
            raise CheckpointError(
                f"{where}: lm_head.weight differs from model.embed_tokens.weight, which "
                "tie_word_embeddings says it equals"
            )


def _harmless(name: str, decoder: Decoder) -> bool:
    """Return whether an extra tensor holds nothing new."""
    if name == "lm_head.weight":
        return bool(decoder.config.tied)
    return name.endswith(".rotary_emb.inv_freq")  # computed; kept by files of old versions


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


# -- folders -------------------------------------------------------------------------------------


def _load_folder(
    folder: Path, dtype: Any, device: Any, tokenizer: bool
) -> tuple[Decoder, Tokenizer | None]:
    values = _json(folder / "config.json")
    beside = folder / "generation_config.json"
    if beside.is_file():
        eos = end_tokens(Keys(_json(beside), str(beside)))
        values["eos_token_id"] = list(eos) or values.get("eos_token_id")
    config = from_dict(values, where=str(folder / "config.json"))
    tensors: dict[str, tuple[tuple[int, ...], Read]] = {}
    for file in _weight_files(folder):
        for name, shape, read in _safetensors(file):
            if name in tensors:
                raise CheckpointError(f"{file}: {name}: in another file as well")
            tensors[name] = (shape, read)
    decoder = Decoder(config, dtype=dtype, device=device)
    fill(decoder, tensors, where=str(folder))
    file = folder / "tokenizer.json"
    if not (tokenizer and file.exists()):
        return decoder, None
    return decoder, read_tokenizer(file, eos=config.eos)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or the only one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = _json(index).get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise CheckpointError(f"{index}: weight_map: must be an object of file names")
        names = sorted(set(map(str, weights.values())))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file")
        return [folder / name for name in names]
    if (one := folder / "model.safetensors").exists():
        return [one]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(f"{folder}: {len(files)} safetensors files and no {index.name}")
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    hint = f" ({pickles[0]} is a pickle, which can run code and is never opened)" * bool(pickles)
    raise CheckpointError(f"{folder}: no safetensors file{hint}")


def _safetensors(file: Path) -> Iterable[tuple[str, tuple[int, ...], Read]]:
    """Yield name, shape and reader of each tensor in a file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(f"{file}: needs safetensors: pip install specmodel[engine]") from None
    check_input(file, fault=CheckpointError)
    try:
        opened: Any = safe_open(file, framework="pt", device="cpu")
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            shape = tuple(opened.get_slice(name).get_shape())
            yield name, shape, partial(opened.get_tensor, name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    text = read_text(file, fault=CheckpointError)
    values = parse_json(text, str(file), fault=CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: must hold a JSON object; got {type(values).__name__}")
    return values
