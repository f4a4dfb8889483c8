"""The tokenizer gives the ids of transformers' AutoTokenizer: families, settings, sides, lengths, texts."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers_offline import FAMILIES, TEXTS, unfit, write
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ftbert.text import TextSettings, Tokenizer, load_tokenizer
from ftbert.text.token_ids import check_token_ids

CASES: list[dict[str, Any]] = [
    *({"do_lower_case": low, "strip_accents": strip} for low, strip in itertools.product((False, True), (None, True, False))),
    {"tokenize_chinese_chars": False, "do_lower_case": False},
    {"truncation_side": "left", "model_max_length": 7},
    {"model_max_length": 12},
    {"model_max_length": 10**30},
    {"max_len": 9},
    {"add_prefix_space": True, "trim_offsets": False},
    {"add_bos_token": False, "add_eos_token": False},
    {"split_special_tokens": True, "model_max_length": 100},
    {"clean_up_tokenization_spaces": False, "padding_side": "left"},
    {"extra_special_tokens": ["<new>", "query:"]},
    {"additional_special_tokens": ["hello"]},
    {"added_tokens_decoder": {"3": {"content": "two", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": False}}},
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    {"tokenizer_class": "RobertaTokenizerFast"},
    {"cls_token": "</s>", "sep_token": "<s>"},
    {"unk_token": "<s>"},
    {"keep_accents": True, "remove_space": False},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_are_those_of_autotokenizer(tmp_path: Path, family: str) -> None:
    compared = 0
    for number, settings in enumerate(CASES):
        folder = write(tmp_path / str(number), family, **settings)
        compared += compare(folder, settings)
    assert compared >= len(CASES) - 4  # the rest are refused by both


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "roberta"])
def test_a_folder_with_a_vocabulary_alone(tmp_path: Path, family: str) -> None:
    for number, settings in enumerate(CASES[:12]):
        assert compare(write(tmp_path / str(number), family, tokenizer_json=False, **settings), settings)


def test_a_tokenizer_that_names_berts_class_is_the_one_of_autotokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all that it holds, though AutoTokenizer is not asked."""

    def held(folder: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = load_tokenizer(folder)
        parts = {key: str(value) for key, value in vars(one).items() if key != "_tokenizer"}
        return type(one), one.backend_tokenizer.to_str(), one.special_tokens_map, parts

    for number, case in enumerate(CASES):
        name = ("BertTokenizer", "BertTokenizerFast")[number % 2]
        folder = write(tmp_path / str(number), "bert", **case | {"tokenizer_class": name})
        ours = held(folder)
        with monkeypatch.context() as patch:
            patch.setattr("ftbert.text.auto_tokenizer._is_of_bert", lambda *_: False)
            assert ours == held(folder)


def test_a_tokenizer_of_bert_comes_without_generation(tmp_path: Path) -> None:
    """Which AutoTokenizer imports, with PyTorch's compiler and scikit-learn: two thirds of a start."""
    folder = write(tmp_path, "bert", tokenizer_class="BertTokenizer")
    script = (
        "import sys; from pathlib import Path; from ftbert.text import load_tokenizer; load_tokenizer(Path(sys.argv[1]))\n"
        "found = {'torch._dynamo', 'sklearn', 'transformers.generation'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)


# A class that is not made for a family's tokenizer.json, and what the file says of its own.
WRONG = {
    "BertTokenizer": ("roberta", "xlm-roberta", "camembert", "albert"),
    "RobertaTokenizerFast": ("bert", "distilbert", "mpnet", "xlm-roberta", "camembert", "albert"),
}


def compare(folder: Path, settings: dict[str, Any]) -> bool:
    """False where transformers cannot make such a tokenizer; then we must not either."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    wrong = family in WRONG.get(settings.get("tokenizer_class", ""), ())
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        want = ids_of(theirs, 64) if not wrong else []
    except Exception:  # noqa: BLE001 - whatever it raises
        if settings.keys() != {"unk_token"}:  # without which AutoTokenizer's cannot encode; tokenizer.json has it
            with pytest.raises(ValueError, match=str(folder)):
                Tokenizer(folder, TextSettings(), 64).encode_batch(TEXTS)
            return False
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = Tokenizer(folder, TextSettings(), 64)
    warned = any("AutoTokenizer gives other ids" in str(one.message) for one in seen)
    assert warned or not wrong
    if warned:
        theirs = of_the_file(folder, cased_by_class=not wrong)
        want = ids_of(theirs, 64)
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == want, settings
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS, max_length=5)] == ids_of(theirs, 5), settings
    return True


def of_the_file(folder: Path, cased_by_class: bool) -> Any:
    """transformers' generic class, with what its release 4 did beside: the class decides on the case of a BertNormalizer."""
    made = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    normalizer = made.backend_tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        usual = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True} if cased_by_class else {}
        for key, name in (("do_lower_case", "lowercase"), ("strip_accents", "strip_accents"), ("tokenize_chinese_chars", "handle_chinese_chars")):
            if key in (usual | stated):
                setattr(normalizer, name, (usual | stated)[key])
        made.backend_tokenizer.normalizer = normalizer
    return made


def ids_of(tokenizer: Any, most: int) -> list[list[int]]:
    found: list[list[int]] = tokenizer(TEXTS, truncation=True, max_length=min(tokenizer.model_max_length, most))["input_ids"]
    return found


@pytest.mark.parametrize("name", ["minilm", "camembertv2"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_class_that_does_not_fit_tokenizer_json(tmp_path: Path, name: str, side: str) -> None:
    """Its ids count, with what the config says of lengths, sides and added tokens, for pairs too."""
    folder = unfit(tmp_path, name, model_max_length=20, truncation_side=side, additional_special_tokens=["<new>"])
    auto = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    file = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    file.add_special_tokens([AddedToken("<new>", special=True, normalized=False)])
    with pytest.warns(UserWarning, match=r"AutoTokenizer gives other ids than tokenizer\.json"):
        ours = Tokenizer(folder, TextSettings(lower_case=True), 64)
    assert ours.max_length == 20
    file.enable_truncation(20, direction=side)
    file.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([file.normalizer] if file.normalizer else [])])
    texts = [*TEXTS, "a<new>b hello"]
    want = [one.ids for one in file.encode_batch(texts)]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == want
    assert want != auto(texts, truncation=True, max_length=20)["input_ids"]
    pairs = list(itertools.pairwise(text for text in TEXTS if len(text) < 40))
    found = ours.tokens(pairs)
    encoded = file.encode_batch(pairs)
    assert [ids.tolist() for ids in found.rows()] == [one.ids for one in encoded]
    if name == "minilm":  # RoBERTa's class gives no types, BERT's does
        assert found.types is not None
        assert found.types.tolist() == [one for pair in encoded for one in pair.type_ids]
    assert ours.special_ids >= set(file.encode("").ids)
    assert ours.prompt_tokens("hello") == len(file.encode("hello").ids) - 1


def test_the_class_that_the_file_names_is_no_matter_without_tokenizer_json(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", tokenizer_json=False, do_lower_case=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokenizer(folder, TextSettings(), 64)


def test_legacy_files_of_special_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", do_lower_case=False)
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": "[MASK]", "cls_token": "[CLS]"}))
    (folder / "added_tokens.json").write_text(json.dumps({"two spaces": 300}))
    assert compare(folder, {})


def test_a_folder_without_a_config_goes_by_its_tokenizer_config(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", tokenizer_class="BertTokenizer", do_lower_case=True)
    want = Tokenizer(folder, TextSettings(), 64).encode_batch(TEXTS)
    (folder / "config.json").unlink()
    got = Tokenizer(folder, TextSettings(), 64).encode_batch(TEXTS)
    assert [ids.tolist() for ids in got] == [ids.tolist() for ids in want]


def test_transformers_gives_no_alarm_about_lengths(tmp_path: Path) -> None:
    """Texts are cut, or refused in words, behind its tokenizer."""
    folder = write(tmp_path / "model", FAMILIES[0], model_max_length=8)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert len(load_tokenizer(folder)("word " * 50)["input_ids"]) > 8
        assert not told
        AutoTokenizer.from_pretrained(folder)("word " * 50)
        assert any("sequence length is longer" in one for one in told)
    finally:
        logger.removeHandler(handler)


def test_lengths_do_not_disturb_each_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "bert", split_special_tokens=True), TextSettings(), 64)
    want = {length: len(tokenizer.encode_batch(["hello " * 80], max_length=length)[0]) for length in range(3, 13)}
    assert want == {length: length for length in want}
    literal = tokenizer.encode_batch(["[MASK]"], max_length=50)[0]
    assert len(literal) > 3  # split, in the copy too
    with ThreadPoolExecutor(4) as pool:
        lengths = [3 + i % 10 for i in range(200)]
        got = pool.map(lambda length: len(tokenizer.encode_batch(["hello " * 80], max_length=length)[0]), lengths)
    assert list(got) == lengths


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: cannot be used"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be used"),
        ("tokenizer_config.json", '{"model_max_length": 2}', "a maximum length of 2 leaves no room"),
        ("tokenizer_config.json", '{"model_max_length": "64"}', r"tokenizer_config\.json: model_max_length must be"),
        ("tokenizer_config.json", '{"model_max_length": NaN}', r"tokenizer_config\.json: model_max_length must be"),
        ("tokenizer_config.json", '{"truncation_side": "up"}', r"tokenizer_config\.json: cannot be used"),
        ("tokenizer_config.json", '{"do_lower_case": "yes"}', r"tokenizer_config\.json: cannot be used"),
        ("special_tokens_map.json", "[", r"special_tokens_map\.json: cannot be used"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    folder = write(tmp_path, "bert")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        Tokenizer(folder, TextSettings(), 64)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("largest", [1_000_300, 10**7, 4_000_000_000, 10**25])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda file, one: file["model"]["vocab"].update(far=one)),
        ("tokenizer.json", lambda file, one: file["added_tokens"].append({**file["added_tokens"][0], "id": one, "content": "far"})),
        ("tokenizer_config.json", lambda file, one: file.update(added_tokens_decoder={str(one): {"content": "far"}})),
        ("added_tokens.json", lambda file, one: file.update(far=one)),
        ("vocab.json", lambda file, one: file.update(far=one)),
    ],
)
def test_an_id_far_beyond_the_vocabulary_is_refused(
    tmp_path: Path, family: str, name: str, change: Callable[[Any, int], None], largest: int
) -> None:
    """Libraries would take memory for every id below it, and end the process. A million they can take."""
    folder = write(tmp_path, family)
    path = folder / name
    file = json.loads(path.read_text()) if path.exists() else {}
    change(file, largest)
    path.write_text(json.dumps(file))
    with contextlib.ExitStack() as stack:
        if largest > 2 << 20:
            stack.enter_context(pytest.raises(ValueError, match=rf"{name}: .*far"))
        check_token_ids(folder)
    if largest > 2 << 20:
        with pytest.raises(ValueError, match=str(folder)):
            Tokenizer(folder, TextSettings(), 64)


def test_code_of_the_folder_never_runs(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil")
    (folder / "config.json").write_text("{}")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match=str(folder)):
        Tokenizer(folder, TextSettings(), 64)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("with_file", [True, False])
def test_a_part_in_python_counts_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_file: bool) -> None:
    """RoFormer cuts texts into words of jieba, and saves a tokenizer.json without them."""
    folder = write(tmp_path, "bert", tokenizer_json=with_file, tokenizer_class="RoFormerTokenizer")
    (folder / "config.json").write_text('{"model_type": "roformer"}')
    if not with_file:
        with pytest.raises(ValueError, match="You need to install rjieba"):
            load_tokenizer(folder)

    def tokenize(text: str, hmm: bool) -> list[tuple[str, int, int]]:
        """Pairs of characters, in the place of words."""
        return [(text[i : i + 2], i, min(i + 2, len(text))) for i in range(0, len(text), 2)]

    monkeypatch.setitem(sys.modules, "rjieba", SimpleNamespace(tokenize=tokenize))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello")["input_ids"])[:3] == ["[CLS]", "he", "l"]
    rows = Tokenizer(folder, TextSettings(), 64).encode_batch(["hello", "world"])
    assert list(rows[0]) == tokenizer("hello")["input_ids"]
