"""Random settings of text: load equals sentence-transformers, or is refused with a ValueError that names a file.

python tests/fuzz_text.py --count N --seed S
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from conftest import make_bert
from tokenizers_offline import TEXTS, modules_of, write

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_ODD: list[Any] = [None, True, False, 0, -1, 1, 3, 7, 1.5, 1e30, "", "a", "cls", [], ["a"], {}, {"a": 1}, "中", 10**30]
# Likely values for each entry of each file; any may also get an odd one.
_FILES: dict[str, dict[str, list[Any]]] = {
    "tokenizer_config.json": {
        "do_lower_case": [True, False], "strip_accents": [True, False, None], "tokenize_chinese_chars": [True, False],
        "truncation_side": ["left", "right"], "model_max_length": [5, 16, 512, 10**30],
        "tokenizer_class": ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "MPNetTokenizer"],
        "unk_token": ["[UNK]"], "cls_token": ["[SEP]", "[CLS]"], "sep_token": ["[MASK]"], "max_len": [9],
        "extra_special_tokens": [["hello"], ["two", "three"]], "split_special_tokens": [True, False],
        "add_prefix_space": [True], "add_bos_token": [True], "clean_up_tokenization_spaces": [True],
        "auto_map": [{"AutoTokenizer": ["x.X", None]}],
    },
    "config_sentence_transformers.json": {
        "prompts": [{"query": "query: ", "document": ""}, {"a": "hello ", "b": None}, {}],
        "default_prompt_name": ["query", "a", "document"], "truncate_dim": [1, 16, 64, 100],
        "similarity_fn_name": ["cosine", "dot", "euclidean", "manhattan", "maxsim"],
        "model_type": ["SentenceTransformer", "CrossEncoder"],
    },
    "sentence_bert_config.json": {
        "max_seq_length": [6, 20, 48], "do_lower_case": [True, False], "query_length": [5, 9], "document_length": [8],
        "processor_kwargs": [{"do_lower_case": False}, {"model_max_length": 9}],
        "tokenizer_args": [{"model_max_length": 7}], "model_kwargs": [{"dtype": "float32"}],
        "transformer_task": ["feature-extraction"], "query_expansion": [None], "processing_kwargs": [{}],
    },
    "1_Pooling/config.json": {
        "word_embedding_dimension": [64], "embedding_dimension": [64],
        "pooling_mode": ["cls", "mean", "max", "mean_sqrt_len_tokens", "lasttoken", ["mean"]],
        "pooling_mode_cls_token": [True, False], "pooling_mode_mean_tokens": [True, False],
        "pooling_mode_max_tokens": [True], "include_prompt": [True, False],
    },
    "2_Normalize/config.json": {"module_input_name": ["sentence_embedding", "token_embeddings"]},
}  # fmt: skip


def make_case(folder: Path, weights: Path, rng: random.Random) -> None:
    """A folder with a BERT, a tokenizer and random settings, some of them nonsense, some files broken or missing."""
    shutil.copytree(weights, folder)
    kinds = rng.choice([["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]])
    if rng.random() < 0.08:
        kinds = rng.choices(["Transformer", "Pooling", "Normalize", "Dropout", "Dense"], k=rng.randint(0, 4))
    modules: Any = modules_of(*kinds)
    if rng.random() < 0.04:
        modules = rng.choice(_ODD)
    elif modules and rng.random() < 0.06:
        rng.choice(modules)[rng.choice(["path", "type", "name"])] = rng.choice([*_ODD, "../x", "/etc", "1_Pooling"])
    files: dict[str, Any] = {"modules.json": modules}
    for name, entries in _FILES.items():
        chosen = rng.sample(sorted(entries), rng.randint(0, min(4, len(entries))))
        files[name] = {key: rng.choice(_ODD if rng.random() < 0.06 else entries[key]) for key in chosen}
    files["1_Pooling/config.json"].setdefault("embedding_dimension", 64)
    files["1_Pooling/config.json"].pop("word_embedding_dimension", None)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if rng.random() < 0.03:
            continue  # missing
        text = json.dumps(content, ensure_ascii=False).encode()
        if rng.random() < 0.03:
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.randbytes(rng.randint(0, 3)) + text[place + rng.randint(0, 5) :]
        path.write_bytes(text)


def judge(folder: Path, cut: int) -> str:
    """"same", "refused", "only ours" (sentence-transformers cannot load it), "told" (a warning says that tokenizer.json
    counts, where transformers makes other ids of it); AssertionError for anything else."""
    from sentence_transformers import SentenceTransformer

    import ftbert

    texts = [text for text in TEXTS if text.strip()][cut:] + [""]
    try:
        theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        theirs.max_seq_length = min(theirs.max_seq_length, 48)  # beyond the positions it reads outside its table
        wanted = [
            method(texts, show_progress_bar=False)
            for method in (theirs.encode, theirs.encode_query, theirs.encode_document)
        ]
        name = theirs.similarity_fn_name
    except Exception:  # noqa: BLE001 - whatever it raises
        wanted = None
    try:
        model = ftbert.load(folder)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = [
                method(texts, normalize=None, show_progress_bar=False)
                for method in (model.encode, model.encode_query, model.encode_document)
            ]
    except (ValueError, FileNotFoundError) as error:  # modules.json may name a folder without a model
        assert str(folder) in str(error) or "length" in str(error), f"names no file: {error}"
        return "refused"
    if wanted is None:
        return "only ours"
    if any("other ids than tokenizer.json" in str(one.message) for one in told):
        return "told"
    for ours, expected in zip(got, wanted, strict=True):
        assert ours.shape == expected.shape, (ours.shape, expected.shape)
        finite = np.isfinite(expected)  # max over nothing is -inf there
        assert np.abs(ours - expected)[finite].max(initial=0) < 2e-5, np.abs(ours - expected).max(axis=1)
    assert model.similarity_fn_name == name
    return "same"


def run(count: int, seed: int, work: Path) -> Counter[str]:
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    weights = work / "weights"
    write(weights, "bert")
    make_bert(vocab_size=300, max_position_embeddings=48).save_pretrained(weights)
    found: Counter[str] = Counter()
    for number in range(seed, seed + count):
        rng = random.Random(number)
        folder = work / f"case{number}"
        make_case(folder, weights, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[judge(folder, rng.randrange(8))] += 1
        except Exception as error:
            raise AssertionError(f"seed {number} ({folder}): {type(error).__name__}: {error}") from error
        shutil.rmtree(folder)
    logging.disable(logging.NOTSET)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        print(dict(run(options.count, options.seed, Path(work))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
