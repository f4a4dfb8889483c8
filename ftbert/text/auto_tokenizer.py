"""transformers' tokenizer of a folder: what AutoTokenizer builds, where that gives the ids of tokenizer.json.

Families and releases of transformers differ in the class that reads the files, the entries of tokenizer_config.json
that it applies and the parts of tokenizer.json that it rebuilds. So AutoTokenizer does that. Since release 5 a class
builds a tokenizer of its own kind from the words of tokenizer.json; where it is not the file's (tokenizer_config.json
names none, or a wrong one), texts become other ids than the model was trained with. Then transformers' generic class
reads the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftbert.caller import warn_caller
from ftbert.input_file import ORIGIN, expect_file, origin, read_json_object
from ftbert.own_models import know_type
from ftbert.text.charsmap import check_charsmaps_of
from ftbert.text.panics import panics_as_errors
from ftbert.text.settings import TextSettings
from ftbert.text.token_ids import check_token_ids

# Any of these lets transformers build a tokenizer when tokenizer.json itself is missing.
_VOCABULARIES = (
    "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "sentencepiece.model",
)  # fmt: skip
# Every file that a tokenizer of transformers opens (`vocab_files_names` of its classes; tests/test_text_files.py
# compares), whatever family its class is named after: RoBERTa's checkpoints come with seven kinds.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "vocab.bpe", "bpe.codes", "dict.txt", "*.model", "*.spm", "*.tiktoken",
    "prophetnet.tokenizer", "byte_maps.json", "emoji.json", "entity_vocab.json", "normalizer.json", "tekken.json",
    "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "word_pronunciation.json", "word_shape.json",
    # Of no use to an encoder, and read by AutoTokenizer: the copy is the same tokenizer to it.
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
TOKENIZER_SUFFIXES = frozenset(Path(name).suffix for name in TOKENIZER_FILES)
# What tokenizers of different kinds make different ids of.
_PROBES = (
    "Hello World, hello world!", "un-believable U.S.A. e-mail@host.com 3.14%", "Crème brûlée nai\u0308ve CAFÉ Ångström",
    "漢字かな交じり文 한국어 ไทย हिन्दी العربية עברית русский Ελληνικά", "  two  spaces ", "tab\tline\nreturn\r\n end",
    "🙂 👩\u200d👩\u200d👧 ½ ﬁne ａｂｃ　ｗｉｄｅ", "don't it's we'll", "x" * 120, "", " ",
)  # fmt: skip
_MOST_ADDED = 256  # added tokens that are compared
# Options of tokenizer_config.json that count for a tokenizer.json with BERT's normaliser, by their names in that.
_OF_BERT = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip


def load_tokenizer(folder: Path, settings: TextSettings | None = None, by_class: bool = False) -> Any:
    """transformers' tokenizer of `folder`, which may be a converted one, as `settings` ask for it. Never runs the
    folder's code or goes online.

    Warns where AutoTokenizer gives other ids than tokenizer.json, which then counts; by_class: not what it gives.
    FileNotFoundError without its files, ValueError naming the one that cannot be used.
    """
    settings = settings or TextSettings()
    folder = folder / settings.subfolder
    if not any((folder / name).exists() for name in ("tokenizer.json", *_VOCABULARIES)):
        if (folder / ORIGIN).exists():
            why = read_json_object(folder / ORIGIN).get("no_texts") or "the file has no vocabulary"
            raise FileNotFoundError(f"{origin(folder)}: no tokenizer here: {why}. Pass token ids to the model")
        raise FileNotFoundError(
            f"{origin(folder)}: no tokenizer here; expected tokenizer.json or one of {', '.join(_VOCABULARIES)}. "
            "Copy the tokenizer's files beside the weights, or pass token ids to the model"
        )
    for path in folder.iterdir():
        if path.suffix in TOKENIZER_SUFFIXES:
            expect_file(path)  # a pipe in the place of a file would hold it for ever
    check_token_ids(folder)
    check_charsmaps_of(folder / "tokenizer.json")
    given = {"local_files_only": True, "trust_remote_code": False, **settings.tokenizer_arguments}
    try:
        with panics_as_errors():
            static = settings.static is not None
            tokenizer = _of_a_table(folder) if static else _of_a_model(folder, settings, given, by_class)
    except Exception as error:
        raise ValueError(f"{origin(_culprit(folder))}: cannot be used as a tokenizer ({explain(error)})") from error
    # Texts are cut, or refused in words, behind the tokenizer: its alarm about their length would come before either.
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    if settings.multi is not None:
        _keep_markers_whole(tokenizer, settings.multi.markers)
    if settings.lower_case:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ValueError(f"{origin(folder)}: do_lower_case is not supported for {type(tokenizer).__name__}")
        _lower_first(fast)
    return tokenizer


def _of_a_model(folder: Path, settings: TextSettings, given: Mapping[str, Any], by_class: bool) -> Any:
    of_bert = _is_of_bert(folder, settings)
    tokenizer = _class(of_bert).from_pretrained(str(folder), **({} if of_bert else _config(folder)), **given)
    return tokenizer if by_class else _by_the_file(folder, tokenizer, given)


def _of_a_table(folder: Path) -> Any:
    """tokenizer.json as the package `tokenizers` reads it, without special tokens around a text."""
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    fast: Any = Fast.from_file(str(folder / "tokenizer.json"))
    direction = (fast.truncation or {}).get("direction", "right")
    fast.no_truncation()
    fast.no_padding()
    fast.post_processor = None
    return PreTrainedTokenizerFast(tokenizer_object=fast, truncation_side=direction)


def _class(of_bert: bool) -> Any:
    """Importing AutoTokenizer takes more than all else of a start: it comes with generation, PyTorch's compiler and
    scikit-learn. BERT's class, which it would choose, comes without."""
    if of_bert:
        from transformers import BertTokenizerFast  # type: ignore[attr-defined]  # an alias since release 5

        return BertTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_of_bert(folder: Path, settings: TextSettings) -> bool:
    """Whether config.json and tokenizer_config.json both name BERT's, and nothing names another class."""
    try:
        config, stated = (read_json_object(folder / name) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError):
        return False  # AutoTokenizer finds what is wrong
    model = config.get("huggingface", config)
    classes = ("BertTokenizer", "BertTokenizerFast")
    return (
        isinstance(model, dict) and model.get("model_type") == "bert" and stated.get("tokenizer_class") in classes
        and "auto_map" not in stated and not settings.tokenizer_arguments
    )  # fmt: skip


def _keep_markers_whole(tokenizer: Any, markers: Sequence[str]) -> None:
    """Each marker, or its first word, that the tokenizer has an id for and takes apart becomes a token of its own: it
    was put before texts as an id when the model was trained."""
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    for marker in markers:
        one = next((one for one in (marker, marker.split(None, 1)[0]) if one in known), None)
        if one is not None and tokenizer.tokenize(one) != [one]:
            added = [AddedToken(one, normalized=False, special=True)]
            tokenizer.add_special_tokens({"additional_special_tokens": added})


def _by_the_file(folder: Path, tokenizer: Any, given: Mapping[str, Any]) -> Any:
    """`tokenizer` itself where it gives the ids of tokenizer.json, or there is none; else the generic class's, which
    takes the file as it is, with what else AutoTokenizer knows."""
    from transformers import PreTrainedTokenizerFast

    mine = getattr(tokenizer, "backend_tokenizer", None)
    if mine is None or type(tokenizer) is PreTrainedTokenizerFast or not (folder / "tokenizer.json").exists():
        return tokenizer
    generic = PreTrainedTokenizerFast.from_pretrained(str(folder), **given)
    fast = generic.backend_tokenizer
    _keep_options(mine, fast, generic.init_kwargs)
    texts = [*_PROBES, *(f"hello{token} {token}world" for token in list(_added(fast))[:_MOST_ADDED])]
    found = _ids(mine, texts)
    if found == _ids(fast, texts):
        return tokenizer
    if {"add_bos_token", "add_eos_token"}.intersection(generic.init_kwargs):
        # The generic class makes another template of these; classes that are not for them leave the file's.
        fast.post_processor = type(fast).from_file(str(folder / "tokenizer.json")).post_processor
        if found == _ids(fast, texts):
            return tokenizer
    if not is_storable(mine):
        return tokenizer
    warn_caller(
        f"{origin(folder)}: AutoTokenizer gives other ids than tokenizer.json, since it reads it as a "
        f"{type(tokenizer).__name__}; those of tokenizer.json are taken. Name the right tokenizer_class in "
        'tokenizer_config.json ("PreTrainedTokenizerFast" takes the file as it is)',
    )
    special = [token for token, special in _added(fast).items() if special]
    generic.add_special_tokens({"additional_special_tokens": special})
    generic.model_input_names = tokenizer.model_input_names
    return generic


def is_storable(fast: Any) -> bool:
    """Whether a file can hold it. RoFormer's cuts words with jieba, in Python, which tokenizer.json leaves out."""
    try:
        pickle.dumps([fast.normalizer, fast.pre_tokenizer, fast.post_processor, fast.decoder])
    except Exception:  # noqa: BLE001 - tokenizers raises nothing more precise
        return False
    return True


def _keep_options(mine: Any, fast: Any, stated: Mapping[str, Any]) -> None:
    """What transformers has always taken from tokenizer_config.json or from a class, where the file has a part of the
    same kind: case and accents, the space before the first word, the special tokens around a text."""
    from tokenizers import normalizers, pre_tokenizers, processors

    if isinstance(bert := fast.normalizer, normalizers.BertNormalizer):
        for key, name in _OF_BERT.items():
            if isinstance(mine.normalizer, normalizers.BertNormalizer):
                setattr(bert, name, getattr(mine.normalizer, name))
            elif key in stated:
                setattr(bert, name, stated[key])
        fast.normalizer = bert
    bytes_ = pre_tokenizers.ByteLevel
    if isinstance(before := fast.pre_tokenizer, bytes_) and isinstance(mine.pre_tokenizer, bytes_):
        before.add_prefix_space = mine.pre_tokenizer.add_prefix_space
        fast.pre_tokenizer = before
    around = processors.RobertaProcessing
    if isinstance(fast.post_processor, around) and isinstance(mine.post_processor, around):
        fast.post_processor = mine.post_processor


def _added(fast: Any) -> dict[str, bool]:
    """The added tokens, and whether each is special."""
    return {token.content: token.special for token in fast.get_added_tokens_decoder().values()}


def _ids(fast: Any, texts: Sequence[str]) -> Any:
    """Of the texts, and of two as a pair; None where it cannot encode them."""
    fast.no_padding()
    fast.no_truncation()
    try:
        return [one.ids for one in fast.encode_batch([*texts, (texts[0], texts[1])])]
    except Exception:  # noqa: BLE001 - of no type of its own: a vocabulary without the unknown token
        return None


def _config(folder: Path) -> dict[str, Any]:
    """The model's config where AutoTokenizer does not find it by itself: it says which class reads the files."""
    from transformers import AutoConfig, PretrainedConfig

    path = folder / "config.json"
    if not path.exists():
        return {"config": PretrainedConfig()}  # tokenizer_config.json alone decides
    original = read_json_object(path).get("huggingface")
    if not isinstance(original, dict) or "model_type" not in original:
        return {}
    know_type(original["model_type"])
    config = AutoConfig.for_model(**original)
    config._name_or_path = str(folder)
    return {"config": config}


def _culprit(folder: Path) -> Path:
    """The file that an error of AutoTokenizer is most likely about."""
    from tokenizers import Tokenizer as Fast

    path = folder / "tokenizer.json"
    if path.exists():
        try:
            with panics_as_errors():
                Fast.from_file(str(path))
        except Exception:  # noqa: BLE001 - tokenizers raises nothing more precise
            return path
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            try:
                read_json_object(folder / name)
            except ValueError:
                return folder / name
    stated = folder / "tokenizer_config.json"
    return stated if stated.exists() else folder


def explain(error: Exception) -> str:
    """An error of a package that has no types of its own, in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _lower_first(fast: Any) -> None:
    """What sentence-transformers does for do_lower_case: Lowercase before the rest, unless it is there."""
    from tokenizers import normalizers

    before: Any = fast.normalizer
    rest: list[Any] = [] if before is None else [before]
    if isinstance(before, normalizers.Sequence):
        rest = [before[place] for place in range(len(before))]  # type: ignore[arg-type]
    if not any(isinstance(one, normalizers.Lowercase) for one in rest):
        fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
