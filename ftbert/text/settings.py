"""What a model folder says about turning text into one vector, read as sentence-transformers reads it.

The files: `modules.json`, which names the folders of the others, `config_sentence_transformers.json`,
`sentence_bert_config.json`, `1_Pooling/config.json`, `2_Dense/config.json`. Without `modules.json` the others do not
count: such a folder gets mean pooling and the tokenizer's own maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ftbert.input_file import origin, read_json_object, shown
from ftbert.own_classes import in_transformers_words
from ftbert.sentence_modules import MODULES, ROUTERS, Module, read_modules, told_routes, transformer_folder
from ftbert.text.checks import length_in
from ftbert.text.own_modules import known_modules, task_prompts
from ftbert.text.pooling_settings import read_pooling
from ftbert.text.stanford import ARCHITECTURE, read_stanford
from ftbert.text.static_settings import StaticSettings, is_static, read_static
from ftbert.text.towers import gives_text_features, read_tower
from ftbert.text.transformer_settings import read_transformer, sentence_config
from ftbert.text.vector_modules import (
    NOTHING,
    OF_TOKENS,
    QUANTIZER,
    DenseSettings,
    LayerSettings,
    MultiSettings,
    SparseSettings,
    kind_of,
    read_behind,
    read_expansion,
    read_linears,
    read_multi,
    read_projection,
    read_routed_splade,
    read_splade,
    width_behind,
    with_pylates_own,
)

USUAL = {"query": "", "document": ""}  # prompts that every model has
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
TOKEN_SIMILARITIES = ("maxsim", "meanmaxsim")  # of vectors of tokens

_HEAD = "config_sentence_transformers.json"
_MODEL_TYPE, _SCORES_TYPE = "SentenceTransformer", "CrossEncoder"
# What a transformer's file may say of its model: task, the output's name here, the output's name in transformers.
_STATES = ("feature-extraction", "token_embeddings", "last_hidden_state")
_LOGITS = ("fill-mask", "token_embeddings", "logits")
_NEXT = ("text-generation", "causal_logits", "logits")
_SCORES = ("sequence-classification", "scores", "logits")
_HINT = "ftbert.optimize(SentenceTransformer(folder)) makes its encoder faster and leaves the other modules to torch"

class OtherVectors(ValueError):
    """A folder's model is not made for the vectors that were asked for: one a text, sparse ones, one for each token."""


@dataclass(frozen=True)
class LogitScore:
    """The logit of one token behind a text's last, minus that of another where there is one. Ids, or the tokens
    themselves. stated: a module of the folder says so."""

    true: int | str
    false: int | str | None
    stated: bool = False


@dataclass(frozen=True)
class TextSettings:
    """How a model wants its text treated.

    pooling: one of `POOLINGS`, or several joined by "+", whose vectors stand one after the other. include_prompt: the
    prompt's tokens are pooled too. dense: what the pooled vector goes through. normalize: the folder ends in a
    Normalize module. max_length, query_length, document_length: tokens with the special ones, None where the folder
    does not say. lower_case: lower the text before the tokenizer. tokenizer_arguments: for AutoTokenizer. prompts: by
    name; default_prompt_name: the one put before every text. truncate_dim: entries kept of a vector. similarity: one of
    `SIMILARITIES`, of vectors of tokens of `TOKEN_SIMILARITIES`. subfolder: where in the folder the tokenizer is.
    stated: the folder itself says how its vectors are made. logit_score: of a model that scores by what it would say
    next; scored: of one whose pooled vectors are scores. sparse, multi: how sparse vectors and those of tokens are
    made, None where there are none. filled: padding tokens stand behind each text, up to the model's length, as tokens
    that others attend to. other: why there is no vector a text, "" where there is one. projection: what each token's
    state goes through first, of a class of its own; `dense` begins with it. static: how texts become tokens of a table
    without a network.
    """

    pooling: str = "mean"
    include_prompt: bool = True
    normalize: bool = False
    max_length: int | None = None
    query_length: int | None = None
    document_length: int | None = None
    lower_case: bool = False
    tokenizer_arguments: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=lambda: dict(USUAL))
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    similarity: str = "cosine"
    dense: tuple[LayerSettings, ...] = ()
    subfolder: str = ""
    stated: bool = False
    logit_score: LogitScore | None = None
    scored: bool = False
    sparse: SparseSettings | None = None
    multi: MultiSettings | None = None
    filled: bool = False
    other: str = ""
    projection: tuple[DenseSettings, ...] = ()
    static: StaticSettings | None = None

    def expect(self, vectors: str) -> None:
        """`OtherVectors` where the folder's model does not give "dense", "sparse" or "multi" ones."""
        if vectors == "dense" and self.other:
            raise OtherVectors(self.other)
        if vectors == "sparse" and self.sparse is None:
            raise OtherVectors(
                "this model gives no sparse vectors: its folder has neither SpladePooling nor sparse_linear.pt, and is "
                "no masked language model alone"
            )
        if vectors == "multi" and self.multi is None:
            raise OtherVectors(
                "this model gives no vectors of tokens to compare: its folder has neither a Dense without pooling nor "
                "colbert_linear.pt; encode(..., output_value='token_embeddings') gives the hidden states"
            )

    @property
    def default_prompt(self) -> str:
        """Put before every text where the caller names no prompt."""
        return "" if self.default_prompt_name is None else self.prompts.get(self.default_prompt_name, "")

    def width(self, hidden: int, pooling: str | None = None) -> int:
        """Entries of a vector, before any truncation. pooling: another than the folder's. ValueError where a Dense
        module does not fit what comes before it."""
        modes = (pooling or self.pooling).split("+")
        if self.projection and (len(modes) > 1 or "max" in modes):
            raise ValueError(
                f"pooling {'+'.join(modes)} is not supported: this model's class has a linear layer over each token's "
                "state, which ftbert computes behind the pooling; expected one of its modes but max"
            )
        return width_behind(self.dense, hidden * len(modes))

    def state_width(self, hidden: int) -> int:
        """Entries of a token's state."""
        return self.projection[-1].outputs if self.projection else hidden

    @classmethod
    def from_folder(cls, folder: Path) -> TextSettings:
        """As SentenceTransformer reads `folder`. ValueError names the file that is broken or asks for what encode does
        not do; `OtherVectors` names what the model is for."""
        home = transformer_folder(folder)
        modules, pooled = known_modules(read_modules(folder), _config(home))
        values = with_pylates_own(modules, _head(folder))
        subfolder = "" if home == folder else str(home.relative_to(folder))
        if is_static(modules, _config(home)):
            found = read_static(folder / MODULES, home, modules, _config(home))
            return cls(subfolder=subfolder, **found, **_sentence_settings(folder / _HEAD, values))
        kind = kind_of(modules, values) if modules else ""
        if not modules and ARCHITECTURE in _architectures(home):
            found = {**read_stanford(home, _config(home)), "other": OF_TOKENS.format(folder)}
            return cls(subfolder=subfolder, stated=True, similarity=TOKEN_SIMILARITIES[0], **found)
        if kind:
            read = _sparse if kind == "sparse" else _multi
            found = read(folder, home, modules, values)
            return cls(subfolder=subfolder, stated=True, projection=read_projection(home, _config(home)), **found)
        projection = read_projection(home, _config(home))
        sparse, multi = read_linears(home, _config(home).get("hidden_size"))
        tower = read_tower(home, _config(home))
        # What another kind of model saved (a CrossEncoder) is not used for embeddings.
        if not modules or values.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
            if not modules and str(next(iter(_architectures(home)), "")).endswith("ForMaskedLM"):
                sparse = sparse or SparseSettings()
            plain = {"pooling": _default_pooling(home), "dense": projection, **tower}
            plain["prompts"] = {**USUAL, **task_prompts(_config(home))}
            return cls(subfolder=subfolder, sparse=sparse, multi=multi, projection=projection, **plain)
        if gives_text_features(modules[0], sentence_config(home)[1]):
            return cls(subfolder=subfolder, stated=True, **_features(folder, home, modules, tower, values))
        dense: tuple[LayerSettings, ...] = ()
        if pooled is None:
            pooling, behind = _chain(folder / MODULES, modules)
            dense, normalize = read_behind(behind, "sentence_embedding")
            pooled = {**read_pooling(pooling / "config.json"), "normalize": normalize}
        return cls(
            **pooled,
            dense=(*projection, *dense),
            projection=projection,
            subfolder=subfolder,
            stated=True,
            sparse=sparse,
            multi=multi,
            **read_transformer(home, *_STATES),
            **_sentence_settings(folder / _HEAD, values, usual={**USUAL, **task_prompts(_config(home))}),
        )

    @classmethod
    def for_scores(cls, folder: Path) -> TextSettings:
        """As CrossEncoder reads `folder`: prompts, lengths, case and arguments for the tokenizer. ValueError as of
        `from_folder`."""
        modules, values = read_modules(folder), _head(folder)
        home = transformer_folder(folder)
        if is_static(modules, _config(home)):
            return cls.from_folder(folder)
        subfolder = "" if home == folder else str(home.relative_to(folder))
        if not modules or values.get("model_type") != _SCORES_TYPE:
            causal = not modules and str(next(iter(_architectures(home)), "")).endswith("ForCausalLM")
            return cls(prompts={}, subfolder=subfolder, logit_score=LogitScore("yes", "no") if causal else None)
        kinds = [module.kind for module in modules]
        score = read_logit_score(modules[1].folder / "config.json") if kinds == ["Transformer", "LogitScore"] else None
        pooled: dict[str, Any] = {}
        if kinds[:2] == ["Transformer", "Pooling"]:
            pooling, behind = _chain(folder / MODULES, modules)
            layers, _ = read_behind(behind, "sentence_embedding", last="scores")
            projection = read_projection(home, _config(home))
            pooled = {"dense": (*projection, *layers), "projection": projection, "scored": True}
            pooled |= read_pooling(pooling / "config.json")
            if not layers or not pooled["include_prompt"]:
                where = origin(folder / MODULES)
                raise ValueError(f"{where}: scores need a Dense behind a Pooling that includes prompts")
        if score is None and not pooled and kinds != ["Transformer"]:
            raise ValueError(
                f"{origin(folder / MODULES)}: predict computes a Transformer with its head, with LogitScore, or with "
                f"Pooling and Dense behind it; got {', '.join(kinds)}. "
                "ftbert.optimize(CrossEncoder(folder)) makes its encoder faster and leaves the other modules to torch"
            )
        prompts, name = read_prompts(folder / _HEAD, values, {})
        return cls(
            prompts=prompts,
            default_prompt_name=name,
            subfolder=subfolder,
            logit_score=score,
            **pooled,
            **read_transformer(home, *(_NEXT if score else _STATES if pooled else _SCORES), chats=score is not None),
        )


def _head(folder: Path) -> dict[str, Any]:
    """What config_sentence_transformers.json says; without modules.json it does not count."""
    return read_json_object(folder / _HEAD) if (folder / MODULES).exists() and (folder / _HEAD).exists() else {}


def _features(
    folder: Path, home: Path, modules: list[Module], tower: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    """Of a module that gives the vectors of texts, and of images, by itself, and what stands behind it."""
    if "dense" not in tower:
        raise ValueError(f"{folder / MODULES}: {modules[0].full!r} needs a model of texts and images (CLIP, SigLIP)")
    dense, normalize = read_behind([one for one in modules[1:] if one.kind not in NOTHING], "sentence_embedding")
    return {
        **tower,
        "dense": (*tower["dense"], *dense),
        "normalize": normalize,
        **read_transformer(home, *_STATES, features=True),
        **_sentence_settings(folder / _HEAD, values),
    }


def _sparse(folder: Path, home: Path, modules: list[Module], values: dict[str, Any]) -> dict[str, Any]:
    if modules[0].kind in ROUTERS:
        sparse, modules = read_routed_splade(folder / MODULES, modules)
    else:
        sparse = read_splade(folder / MODULES, modules)
    path, config = sentence_config(home)
    if modules[0].kind == "Transformer" and config.get("transformer_task") != "fill-mask":
        raise ValueError(f"{path}: SpladePooling needs logits: expected transformer_task fill-mask")
    return {
        "sparse": sparse,
        "other": f"{folder}: a model of sparse vectors (SPLADE), and encode gives dense ones: call encode_sparse",
        **read_transformer(home, *_LOGITS),
        **_sentence_settings(folder / _HEAD, values, "dot", *SIMILARITIES),
    }


def _multi(folder: Path, home: Path, modules: list[Module], values: dict[str, Any]) -> dict[str, Any]:
    head = folder / _HEAD
    multi = read_multi(folder / MODULES, modules, head, values)
    path, config = sentence_config(home)
    multi = replace(multi, expansion=read_expansion(path, config.get("query_expansion"), head, values))
    prompts = dict(values.get("prompts") or {})
    for kind in ("query", "document"):
        if isinstance(prefix := values.get(f"{kind}_prefix"), str):
            prompts[kind] = prefix + str(prompts.get(kind) or "").removeprefix(prefix)
    found = read_transformer(home, *_STATES, expands=True)
    for key in ("query_length", "document_length"):
        found[key] = length_in(head, values, key) if found[key] is None else found[key]
    return {
        "multi": multi,
        "other": OF_TOKENS.format(folder),
        **found,
        **_sentence_settings(head, {**values, "prompts": prompts}, *TOKEN_SIMILARITIES),
    }


def _chain(where: Path, modules: list[Module]) -> tuple[Path, list[Module]]:
    """The folder of the Pooling, and the modules behind it. ValueError for other chains than Transformer, Pooling and
    any Dense, LayerNorm and Normalize."""
    known = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", QUANTIZER)
    found = [module for module in modules if module.kind not in NOTHING]
    for module in found:
        if module.kind not in known:
            routes = f" ({routes})" if (routes := told_routes(module)) else ""
            raise ValueError(
                f"{where}: module {module.full!r}{routes} is not supported; encode() knows {', '.join(known)}. {_HINT}"
            )
    kinds = [module.kind for module in found]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(known[2:]).issuperset(kinds[2:]):
        raise ValueError(
            f"{where}: expected Transformer, Pooling and behind them only {', '.join(known[2:])}; got "
            f"{', '.join(kinds) or 'nothing'}. {_HINT}"
        )
    return found[1].folder, found[2:]


def read_logit_score(path: Path) -> LogitScore:
    """ValueError for ids that are none."""
    config = read_json_object(path)
    if config.get("module_input_name", _NEXT[1]) != _NEXT[1]:
        raise ValueError(f"{path}: module_input_name is not supported; expected {_NEXT[1]}")
    ids = [config.get(f"{name}_token_id") for name in ("true", "false")]
    for name, one in zip(("true", "false"), ids, strict=True):
        if isinstance(one, bool) or not (isinstance(one, int) and one >= 0) and (one is not None or name == "true"):
            raise ValueError(f"{path}: {name}_token_id must be the id of a token; got {shown(one)}")
    true, false = ids
    assert true is not None
    return LogitScore(true, false, stated=True)


def _default_pooling(folder: Path) -> str:
    """Of a folder without modules: a causal language model's is the last token."""
    architectures = _architectures(folder)
    causal = architectures[:1] and str(architectures[0]).endswith("ForCausalLM")
    return "last" if causal and in_transformers_words(_config(folder)).get("is_causal", True) else "mean"


def _architectures(folder: Path) -> list[Any]:
    config = _config(folder)
    architectures = config.get("architectures") or [] if isinstance(config, dict) else None
    if not isinstance(architectures, list):
        raise ValueError(f"{folder / 'config.json'}: architectures must be a list of names; got {shown(architectures)}")
    return architectures


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    config = read_json_object(path) if path.exists() else {}
    return config.get("huggingface") or config  # a converted folder keeps the original one level down


def check_prompts(name: str, given: Any) -> dict[str, str]:
    """Texts by name, None as an empty one. name: of the setting. ValueError for anything else."""
    if not isinstance(given, Mapping) or not all(isinstance(text, str | None) for text in given.values()):
        raise ValueError(f"{name} must be an object of texts; got {given!r}")
    return {key: text or "" for key, text in given.items()}


def read_prompts(path: Path, config: Mapping[str, Any], usual: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Prompts by name, `usual` where the file has no other, and the name of the one put before every text."""
    prompts = {**usual, **check_prompts(f"{path}: prompts", config.get("prompts") or {})}
    name = config.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise ValueError(f"{path}: default_prompt_name {name!r} is none of the prompts: {', '.join(prompts)}")
    return prompts, name


def _sentence_settings(
    path: Path, config: dict[str, Any], *similarities: str, usual: Mapping[str, str] = USUAL
) -> dict[str, Any]:
    """Of config_sentence_transformers.json: prompts, width, similarity, one of `similarities`, None: any of a text's
    vectors. The first where the file says none of them: what other kinds of models compare by leaves the default.
    usual: prompts where the file has no other."""
    prompts, name = read_prompts(path, config, usual)
    similarities = similarities or SIMILARITIES
    similarity = config.get("similarity_fn_name")
    return {
        "prompts": prompts,
        "default_prompt_name": name,
        "truncate_dim": length_in(path, config, "truncate_dim"),
        "similarity": similarity if similarity in similarities else similarities[0],
    }
