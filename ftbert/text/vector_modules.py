"""What the modules of a folder make of token states: Dense layers, sparse vectors, one vector for each token."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbert.input_file import exists, origin, read_json_object, shown
from ftbert.own_classes import PROJECTION, own_class
from ftbert.sentence_modules import ROUTERS, Module, inner_modules, read_routes
from ftbert.text.checks import positive

NOTHING = ("Dropout",)  # modules that do nothing at inference
# Linear layers beside the weights of a model with three outputs (BGE-M3): a weight and a vector for each token.
SPARSE_LINEAR, MULTI_LINEAR = "sparse_linear.pt", "colbert_linear.pt"

# Why there is no vector a text. {}: the folder.
OF_TOKENS = (
    "{}: a model of one vector for each token (ColBERT), and encode gives one for each text: call encode_multi_vector, "
    "or encode with output_value='token_embeddings'"
)

# What a folder of vectors of another kind shows itself by: its model_type, or the class of any of its modules.
_SPARSE = (
    "SparseEncoder", "SpladePooling", "MLMTransformer", "SparseAutoEncoder", "CSRSparsity", "SparseStaticEmbedding",
)  # fmt: skip
_TABLE = "SparseStaticEmbedding"
_MULTI = ("MultiVectorEncoder", "ColBERT", "MultiVectorMask", "TokenPooling")
# PyLate's configs have the same entries as sentence-transformers' own.
_ALIASES = {"pylate.models.Dense.Dense": "Dense"}
# Entries of config_sentence_transformers.json that only PyLate writes.
_PYLATE = (
    "query_expansion", "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens", "query_prefix",
    "document_prefix", "skiplist_words", "query_length", "document_length",
)  # fmt: skip
# What PyLate does where a folder says nothing else.
_PYLATES_OWN: dict[str, Any] = {
    "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 180,
    "skiplist_words": list(string.punctuation),
}  # fmt: skip


@dataclass(frozen=True)
class DenseSettings:
    """activation(linear(x)), with x added where `residual`; x is brought to length 1 before where `normalized`.

    folder: of its weights; file: where they are no module's, but a linear layer's alone; head: where they are those of
    the checkpoint's head for that. inputs, outputs: entries of a vector. activation: a class of torch.nn, with its
    module.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool = False
    normalized: bool = False
    file: str = ""
    head: str = ""


@dataclass(frozen=True)
class LayerNormSettings:
    """Over vectors of `inputs` entries, which are brought to length 1 before where `normalized`. folder: of its
    weights."""

    folder: Path
    inputs: int
    normalized: bool = False

    @property
    def outputs(self) -> int:
        return self.inputs


@dataclass(frozen=True)
class WholeNumbersSettings:
    """127 * tanh(x), rounded, of each entry of x, which is brought to length 1 before where `normalized`: what
    st_quantize.py beside the weights of pplx-embed-v1 computes by default."""

    normalized: bool = False


LayerSettings = DenseSettings | LayerNormSettings | WholeNumbersSettings
QUANTIZER = "st_quantize.FlexibleQuantizer"


@dataclass(frozen=True)
class SparseSettings:
    """An entry for each token of the vocabulary. linear: gives each token of a text a weight for its own entry, of
    which the largest counts. None: the logits of the masked language model's head, log(1 + relu(x)) so often as `logs`
    says, summed over the text's tokens where `sums`, else the largest. table: the folder of one that gives the entries
    of tokens in texts for the tasks `table_for` (None: for no named one), without a network."""

    logs: int = 1
    sums: bool = False
    linear: DenseSettings | None = None
    table: Path | None = None
    table_for: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Expansion:
    """Tokens behind a query's own, up to `length`. exact: a longer query is truncated to it. attend: others attend to
    them. token: None: the mask token, or the last one of a text where there is none."""

    length: int
    exact: bool
    attend: bool
    token: str | None


@dataclass(frozen=True)
class MultiSettings:
    """A vector for each token. dense: what it goes through; normalize: to length 1 at the end. first: the first token
    has one, too. skipped: words whose tokens have none, in texts for `skipped_for` ("query", "document"). expansion: of
    queries. markers: prompts whose first word is one token, whatever the tokenizer makes of it."""

    dense: tuple[LayerSettings, ...] = ()
    normalize: bool = False
    first: bool = True
    skipped: tuple[str, ...] = ()
    skipped_for: tuple[str, ...] = ("document",)
    expansion: Expansion | None = None
    markers: tuple[str, ...] = ()


def width_behind(layers: Sequence[LayerSettings], width: int) -> int:
    """Entries of a vector behind these layers. ValueError where one does not fit what comes before it."""
    for layer in layers:
        if not isinstance(layer, WholeNumbersSettings):
            if layer.inputs != width:
                raise ValueError(f"{origin(layer.folder)}: takes vectors of {layer.inputs} entries, gets {width}")
            width = layer.outputs
    return width


def with_pylates_own(modules: Sequence[Module], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, of config_sentence_transformers.json, as PyLate reads them where it saved the folder, before
    sentence-transformers wrote a model_type or after."""
    stated = values.get("model_type")
    own_module = any(module.full.startswith("pylate.") for module in modules)
    own_entry = any(key in values for key in _PYLATE) and all(module.kind != "Pooling" for module in modules)
    if stated != "ColBERT" and (stated is not None or not (own_module or own_entry)):
        return dict(values)
    said = {key: value for key, value in values.items() if value is not None or key not in _PYLATES_OWN}
    return {**_PYLATES_OWN, **said, "model_type": "ColBERT"}


def kind_of(modules: Sequence[Module], values: Mapping[str, Any]) -> str:
    """ "sparse", "multi", or "" for one vector a text. values: of config_sentence_transformers.json."""
    kinds = {str(values.get("model_type")), *(module.kind for module in modules)}
    if any(module.full.startswith("pylate.") for module in modules) or kinds.intersection(_MULTI):
        return "multi"
    return "sparse" if kinds.intersection(_SPARSE) else ""


def read_splade(where: Path, modules: Sequence[Module]) -> SparseSettings:
    """Of a Transformer with its masked language model's head, and SpladePooling. where: modules.json. ValueError for
    another chain."""
    found = [module for module in modules if module.kind not in NOTHING]
    for module in found:
        if module.kind not in ("Transformer", "MLMTransformer", "SpladePooling"):
            inside = f" ({inner})" if (inner := _routed(module)) else ""
            raise ValueError(
                f"{where}: module {module.full!r}{inside} is not supported; encode_sparse() knows Transformer, "
                "MLMTransformer and SpladePooling"
            )
    kinds = [module.kind for module in found]
    if len(kinds) != 2 or kinds[0] == "SpladePooling" or kinds[1] != "SpladePooling":
        raise ValueError(f"{where}: expected a Transformer and SpladePooling; got {', '.join(kinds)}")
    path = found[1].folder / "config.json"
    config = read_json_object(path) if path.exists() else {}
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for name, value, known in (
        ("pooling_strategy", strategy, ("max", "sum")), ("activation_function", activation, ("relu", "log1p_relu")),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{path}: {name} {shown(value)} is not supported; expected {' or '.join(known)}")
    return SparseSettings(logs=2 if activation == "log1p_relu" else 1, sums=strategy == "sum")


def read_routed_splade(where: Path, modules: Sequence[Module]) -> tuple[SparseSettings, list[Module]]:
    """Of a Router with two routes, SparseStaticEmbedding and a Transformer with SpladePooling, and the modules of the
    second. ValueError for other routes."""
    routes = read_routes(modules[0])
    tables = {name: one[0] for name, one in routes.modules.items() if [m.kind for m in one] == [_TABLE]}
    others = {name: one for name, one in routes.modules.items() if name not in tables}
    if len(modules) > 1 or {*routes.modules} != {"query", "document"} or len(tables) != 1:
        listed = "; ".join(f"{name}: {', '.join(m.full for m in one)}" for name, one in routes.modules.items())
        behind = f", and behind it {', '.join(module.full for module in modules[1:])}" if len(modules) > 1 else ""
        raise ValueError(
            f"{where}: expected a {modules[0].kind} alone, with {_TABLE} for one of query and document and a "
            f"Transformer with SpladePooling for the other; got {listed}{behind}"
        )
    ((name, table),), ((_, network),) = tables.items(), others.items()
    path = table.folder / "config.json"
    if exists(path) and read_json_object(path).get("path") is not None:
        raise ValueError(f"{path}: path is not supported: expected the table's weights beside it")
    asked = (None, *routes.modules) if routes.default == name else (*routes.modules,)
    chosen = tuple(task for task in asked if task in (None, name))
    return replace(read_splade(where, network), table=table.folder, table_for=chosen), network


def read_linears(folder: Path, hidden: Any) -> tuple[SparseSettings | None, MultiSettings | None]:
    """What the linear layers beside the weights in `folder` make of tokens; hidden: entries of a token's state."""
    if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
        return None, None
    sparse, multi = None, None
    if exists(folder / SPARSE_LINEAR):
        linear = DenseSettings(folder, hidden, 1, True, "torch.nn.modules.activation.ReLU", file=SPARSE_LINEAR)
        sparse = SparseSettings(linear=linear)
    if exists(folder / MULTI_LINEAR):
        linear = DenseSettings(folder, hidden, hidden, True, "torch.nn.modules.linear.Identity", file=MULTI_LINEAR)
        multi = MultiSettings((linear,), normalize=True, first=False)
    return sparse, multi


def read_projection(folder: Path, config: Any) -> tuple[DenseSettings, ...]:
    """The layer that a class of its own has over each token's state; none of transformers' has one. config: of the
    model in `folder`, as HuggingFace writes it. ValueError for a width that is none."""
    own = own_class(config) if isinstance(config, dict) else None
    if own is None or own.projection is None or not own.projection.width:
        return ()
    inputs, outputs = (
        positive(f"{folder / 'config.json'}: {key}", config.get(key)) for key in ("hidden_size", own.projection.width)
    )
    return (DenseSettings(folder, inputs, outputs, False, "torch.nn.modules.linear.Identity", head=PROJECTION),)


def read_multi(where: Path, modules: Sequence[Module], head: Path, values: Mapping[str, Any]) -> MultiSettings:
    """Of a Transformer and any Dense, Normalize and MultiVectorMask over its tokens. where: modules.json; head: the
    file of `values`. ValueError for another chain."""
    found = [module for module in modules if module.kind not in NOTHING]
    kinds = [_ALIASES.get(module.full, module.kind) for module in found]
    known = ("Dense", "Normalize", "MultiVectorMask")
    if kinds[0] != "Transformer" or not set(known).issuperset(kinds[1:]):
        odd = next((m.full for m, kind in zip(found[1:], kinds[1:], strict=True) if kind not in known), found[0].full)
        raise ValueError(
            f"{where}: module {odd!r} is not supported in a model of one vector for each token; expected a Transformer "
            f"and behind it {', '.join(known)}"
        )
    pylate = values.get("model_type") == "ColBERT"  # says nothing of the modules that PyLate itself adds
    dense, normalize = read_behind(found[1:], "token_embeddings", kinds[1:])
    skipped, skipped_for = values.get("skiplist_words"), ["document"]
    for module in found:
        if module.kind == "MultiVectorMask":
            path = module.folder / "config.json"
            config = read_json_object(path) if path.exists() else {}
            if config.get("keep_only_token_ids"):
                raise ValueError(f"{path}: keep_only_token_ids is not supported")
            skipped, given = config.get("skiplist_words"), config.get("skiplist_tasks")
            skipped_for = ["document"] if given is None else [given] if isinstance(given, str) else given
    for name, words in (("skiplist_words", skipped or []), ("skiplist_tasks", skipped_for)):
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{head}: {name} must be a list of words; got {shown(words)}")
    markers = [values.get(f"{kind}_prefix") or "" for kind in ("query", "document")]
    return MultiSettings(
        dense=dense,
        normalize=normalize or pylate,
        skipped=tuple(skipped or ()),
        skipped_for=tuple(skipped_for),
        markers=tuple(marker for marker in markers if isinstance(marker, str) and marker.split()),
    )


def read_expansion(path: Path, own: Any, head: Path, values: Mapping[str, Any]) -> Expansion | None:
    """Of queries. own: what the transformer's file `path` says; values: of the file `head`, where PyLate says it."""
    given, where = own, path
    if own is None and any(key in values for key in _PYLATE):
        where = head
        given = values.get("query_expansion")
        if "query_expansion" not in values and values.get("do_query_expansion") is not False:
            attend = values.get("attend_to_expansion_tokens", values.get("attend_to_mask_tokens"))
            given = {"strategy": "fixed", "attend": bool(attend), "length": values.get("query_length") or 32}
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("strategy") not in ("fixed", "min"):
        raise ValueError(f"{where}: query_expansion must have a strategy, fixed or min; got {shown(given)}")
    token = given.get("token")
    if not isinstance(token, str | None):
        raise ValueError(f"{where}: query_expansion: token must be a text; got {shown(token)}")
    length = positive(f"{where}: query_expansion: length", given.get("length"))
    return Expansion(length, given["strategy"] == "fixed", bool(given.get("attend", False)), token)


def read_behind(
    modules: Sequence[Module], name: str, kinds: Sequence[str] = (), last: str = ""
) -> tuple[tuple[LayerSettings, ...], bool]:
    """The Dense and LayerNorm modules, and whether a Normalize comes last. name: what they take and give; last: what
    the last one gives, where that is another. kinds: of the modules, where theirs are others."""
    layers: list[LayerSettings] = []
    normalized = False
    for module, kind in zip(modules, kinds or [module.kind for module in modules], strict=True):
        path = module.folder / "config.json"
        config = read_json_object(path) if kind in ("Dense", "Normalize", "LayerNorm") and path.exists() else {}
        given = [None, name] if not last or module is not modules[-1] else [last]
        for key, known in (("module_input_name", [None, name]), ("module_output_name", given)):
            if config.get(key) not in known:
                raise ValueError(f"{path}: {key} {config.get(key)!r} is not supported; expected {known[-1]}")
        if kind == "Dense":
            layers.append(_dense(path, config, normalized))
        if kind == QUANTIZER:
            layers.append(WholeNumbersSettings(normalized))
        if kind == "LayerNorm":
            size = positive(f"{path}: dimension", config.get("dimension"))
            layers.append(LayerNormSettings(path.parent, size, normalized))
        normalized = kind == "Normalize" or (normalized and kind not in ("Dense", "LayerNorm", QUANTIZER))
    return tuple(layers), normalized


def _dense(path: Path, config: Mapping[str, Any], normalized: bool) -> DenseSettings:
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str):
        raise ValueError(f"{path}: activation_function must be the name of a class; got {shown(activation)}")
    return DenseSettings(
        path.parent,
        positive(f"{path}: in_features", config.get("in_features")),
        positive(f"{path}: out_features", config.get("out_features")),
        bool(config.get("bias", True)),
        activation,
        bool(config.get("use_residual", False)),
        normalized,
    )


def _routed(module: Module) -> str:
    """The kinds of modules that a Router chooses among, or ""."""
    if module.kind not in ROUTERS:
        return ""
    return ", ".join(sorted({one.kind.rpartition(".")[2] for one in inner_modules(module)}))
