"""Shapes of the decoders whose whole passes are timed, and what they are chosen for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from calibrate.cases import Case
from specmodel.architectures import Architecture
from specmodel.architectures.parts import Attention, MoE
from specmodel.dtypes import BYTES
from specmodel.errors import ArchitectureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a plan depends on.

    Attributes
    ----------
    kind : {"cpu", "cuda"}
    dtypes : tuple of str
        The first is the format of activations; all others are for matrices only.
    cache : float
        Last-level cache. [B]
    memory : float
        What may be taken. [B]
    devices : int
        Devices of this kind on the machine.
    tiny : bool
        Small shapes that check the code, not the device.
    """

    kind: str
    dtypes: tuple[str, ...]
    cache: float
    memory: float
    devices: int = 1
    tiny: bool = False

    @property
    def mode(self) -> str:
        """How kernels are launched."""
        return "graph" if self.kind == "cuda" else "eager"

    def case(self, operator: str) -> Case:
        """Return a case in the activations' format, its shape still to be filled in."""
        return Case(operator=operator, dtype=self.dtypes[0], mode=self.mode)

    @property
    def scale(self) -> int:
        """What dimensions of matrices are divided by."""
        return 32 if self.tiny else 1 if self.kind == "cuda" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention; with experts, `intermediate` is their width."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    @property
    def qkv(self) -> int:
        """Outputs of the fused projection of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.hidden * (self.qkv + self.heads * self.head_dim)
        mlp = 3 * self.hidden * self.intermediate * (self.experts or 1)
        return attention + mlp + self.hidden * self.experts

    @property
    def kv_elements(self) -> int:
        """Elements that one token keeps in the cache of one layer."""
        return 2 * self.kv_heads * self.head_dim


def llama(layers: int, hidden: int, *, head_dim: int = 64, vocab: int = 8192) -> ModelShape:
    """Return a Llama-style shape: four query heads to a KV head, a feed-forward 2.75 as wide."""
    heads = max(4, hidden // head_dim)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        intermediate=hidden * 11 // 4 // 32 * 32,
        vocab=vocab,
    )


SHAPE_8B = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
)
SHAPE_1B = ModelShape(
    layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256
)
SHAPE_MOE = ModelShape(
    layers=4,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=768,
    vocab=32768,
    experts=128,
    top_k=8,
)


def default_models(setting: Setting) -> dict[str, ModelShape]:
    """Return decoders to time: on a GPU 8B and 1B shapes as deep as a quarter of memory allows.

    On a CPU two depths and two widths larger than the last-level cache, because one size cannot
    tell bandwidth from fixed cost, a tiny one for the fixed cost, and one with experts.
    """
    each = BYTES[setting.dtypes[0]]
    if setting.tiny:
        experts = ModelShape(
            layers=1,
            hidden=64,
            heads=4,
            kv_heads=1,
            head_dim=32,
            intermediate=64,
            vocab=256,
            experts=4,
            top_k=2,
        )
        return {
            "llama-2x128": llama(2, 128, head_dim=32, vocab=256),
            "moe-1x64": experts,
        }
    if setting.kind == "cuda":
        shapes = {"8b": SHAPE_8B, "1b": SHAPE_1B, "moe": SHAPE_MOE}
        return {
            f"{name}-shape": _depth(shape, 0.25 * setting.memory / each)
            for name, shape in shapes.items()
        }
    found = {}
    for hidden in (768, 1280):
        layer = llama(1, hidden).layer_weights * each
        least = max(2, round(2.5 * setting.cache / layer))
        for layers in (least, 2 * least):
            shape = _depth(llama(layers, hidden), 0.1 * setting.memory / each)
            found[f"llama-{shape.layers}x{hidden}"] = shape
    found["llama-2x128"] = llama(2, 128, vocab=1024)
    moe = ModelShape(
        layers=4,
        hidden=768,
        heads=12,
        kv_heads=3,
        head_dim=64,
        intermediate=512,
        vocab=4096,
        experts=16,
        top_k=2,
    )
    return found | {"moe-4x768": moe}


def _depth(shape: ModelShape, elements: float) -> ModelShape:
    """Return the shape with no more layers than so many weights allow."""
    room = elements - 2 * shape.vocab * shape.hidden
    return replace(shape, layers=max(1, min(shape.layers, int(room / shape.layer_weights))))


def layer_shape(model: Architecture) -> ModelShape:
    """Return one layer of a model with its LM head, as a shape to time.

    Raises
    ------
    ArchitectureError
        When no layer has plain attention and a gated feed-forward network or gated experts.
    """
    for layer, _ in model.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, Attention) and mixer.v_dim is None and mlp is not None and mlp.gated:
            moe = mlp if isinstance(mlp, MoE) else None
            return ModelShape(
                layers=1,
                hidden=model.hidden_size,
                heads=mixer.heads,
                kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
                intermediate=mlp.width,
                vocab=model.head_vocab_size,
                experts=moe.experts if moe else 0,
                top_k=moe.top_k if moe else 0,
            )
    raise ArchitectureError(
        f"{model.name} has no layer of plain attention and gated feed-forward or experts to time"
    )
