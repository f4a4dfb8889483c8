"""T5's encoders: buckets, whole checkpoints, folders of sentence-transformers; what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_same
from conftest import randomise
from families import make_batch, make_config, make_model
from safetensors.torch import load_file, save_file
from tokenizers_offline import TEXTS, sentence_folder

import ftbert
from ftbert.converters.families import FAMILIES
from ftbert.converters.from_huggingface import convert
from ftbert.converters.relative_bias import buckets

KINDS = ("t5", "mt5", "umt5")


def whole(family: str, size: int = 0) -> Any:
    """A random model with encoder and decoder."""
    from transformers import AutoModelForSeq2SeqLM

    config = make_config(family, size, decoder_start_token_id=0, is_encoder_decoder=True)
    return randomise(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize(("count", "longest"), [(32, 128), (8, 12), (9, 12), (4, 2), (64, 1000), (33, 200)])
def test_buckets_are_transformers_own(count: int, longest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-longest, longest + 1)
    want = T5Attention._relative_position_bucket(distances, num_buckets=count, max_distance=longest)
    assert torch.equal(buckets(count, longest + 1), want)
    ends = T5Attention._relative_position_bucket(torch.tensor([-9 * longest, 9 * longest]), True, count, longest)
    assert torch.equal(buckets(count, longest + 1)[[0, -1]], ends)  # the table's ends stand for all beyond


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets 3: expected at least 4"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8 contradicts relative_attention_num_buckets 32"),
        ({"feed_forward_proj": "gated-"}, "feed_forward_proj 'gated-' is not supported"),
        ({"feed_forward_proj": "glu-relu"}, "feed_forward_proj 'glu-relu' is not supported"),
        ({"feed_forward_proj": "swiglu"}, "activation"),
        ({"is_decoder": True}, "this checkpoint is a decoder"),
        ({"d_model": None}, "config.json lacks d_model"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused(said: dict[str, Any], words: str) -> None:
    config = {"model_type": "t5", "vocab_size": 9, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8}
    FAMILIES["t5"].of(config).config(config)
    with pytest.raises(ValueError, match=words):
        FAMILIES["t5"].of(config | said).config(config | said)


def test_a_table_of_other_buckets_is_refused(tmp_path: Path) -> None:
    make_model("t5", "encoder", 0).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"relative_attention_num_buckets": 8', '"relative_attention_num_buckets": 16'))
    with pytest.raises(ValueError, match=r"SelfAttention.relative_attention_bias.weight.*\[8, 3\].*\[16, 3\]|\[16, 3\].*\[8, 3\]"):
        ftbert.load(tmp_path)


@pytest.mark.parametrize("family", KINDS)
def test_a_checkpoint_with_a_decoder_is_read_as_its_encoder(tmp_path: Path, family: str) -> None:
    reference = whole(family)
    reference.save_pretrained(tmp_path)
    batch = make_batch(reference, "encoder", "left")
    kept = batch["attention_mask"].bool()
    want = reference.get_encoder()(**batch).last_hidden_state[kept]
    path = tmp_path / "model.safetensors"
    for name in ("shared.weight", "encoder.embed_tokens.weight"):  # files have either
        state = load_file(path)
        words = state.pop("shared.weight", None)
        save_file(state | {name: state.pop("encoder.embed_tokens.weight", words)}, path, metadata={"format": "pt"})
        with pytest.warns(UserWarning, match=r"outside the encoder is left out \(decoder\.block"):
            model = ftbert.load(tmp_path)
        assert model.tasks == []
        assert_close(model(**batch).last_hidden_state[kept], want, atol=3e-5)


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_a_head_behind_the_decoder_is_left_out_by_name(tmp_path: Path, ending: str) -> None:
    import transformers

    config = make_config("t5", 0, num_decoder_layers=1, eos_token_id=1, decoder_start_token_id=0)
    reference = randomise(getattr(transformers, f"T5{ending}")(config))
    reference.save_pretrained(tmp_path)
    name = "qa_outputs" if "Question" in ending else "classification_head"
    for source in (reference, tmp_path):
        with pytest.warns(UserWarning, match=rf"left out \(.*decoder\.block.*{name}|left out \({name}.*decoder\.block"):
            model = ftbert.load(source)
        batch = make_batch(reference, "encoder", "right")
        kept = batch["attention_mask"].bool()
        want = reference.get_encoder()(**batch).last_hidden_state[kept]
        assert_close(model(**batch).last_hidden_state[kept], want, atol=3e-5)
        with pytest.raises(ValueError, match="this model has no head for sequence_classification; its heads: none"):
            model.head("sequence_classification")


@pytest.mark.parametrize("family", KINDS)
def test_optimize_computes_the_encoder_of_a_model_that_generates(family: str) -> None:
    model = whole(family, 1)
    batch = make_batch(model, "encoder", "right")
    with torch.no_grad():
        want = model(**batch, decoder_input_ids=batch["input_ids"][:, :5]).logits
        said = model.generate(**batch, max_new_tokens=6)
        ftbert.optimize(model)
        assert_close(model(**batch, decoder_input_ids=batch["input_ids"][:, :5]).logits, want, atol=1e-4)
        assert torch.equal(model.generate(**batch, max_new_tokens=6), said)
    assert not model.get_encoder().forward.fallbacks


@pytest.mark.parametrize("family", KINDS)
def test_padding_and_neighbours_change_nothing(family: str) -> None:
    model = ftbert.load(make_model(family, "encoder", 1))
    batch = make_batch(model.reference(), "encoder", "holes")
    out = model(**batch).last_hidden_state
    other = batch | {"input_ids": torch.where(batch["attention_mask"] > 0, batch["input_ids"], 3)}
    assert torch.equal(model(**other).last_hidden_state, out)
    for row in range(4):
        one = model(*(tensor[row : row + 1] for tensor in batch.values())).last_hidden_state
        assert_close(one[0], out[row], atol=2e-6)


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """As sentence-t5 and gtr: a Dense without a bias, then a Normalize; also converted."""
    from sentence_transformers import SentenceTransformer

    dense = {"in_features": 64, "out_features": 40, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    encoder = make_model("t5", "encoder", 2, vocab_size=300)
    words = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = sentence_folder(tmp_path / "theirs", behind=[dense], normalize=True, model=encoder, tokenizer=words, sentence={"max_seq_length": 48})
    theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    for place in (folder, convert(folder, tmp_path / "ours")):
        assert_same(ftbert.load(place).encode(TEXTS, normalize=None), theirs.encode(TEXTS))
    want = theirs.encode(TEXTS)
    assert_same(ftbert.optimize(theirs).encode(TEXTS), want)


def test_large_models_are_told_of_fp16() -> None:
    sizes = {"d_model": 1024, "d_ff": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8}
    config = FAMILIES["t5"].config(sizes | {"vocab_size": 9})
    assert config.outgrows_fp16
    small = FAMILIES["t5"].config(sizes | {"vocab_size": 9, "d_model": 512})
    assert not small.outgrows_fp16


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_narrow_products_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    model = make_model("umt5", "encoder", 2, vocab_size=300)
    folder = sentence_folder(tmp_path, model=model)
    exact = ftbert.load(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            narrow = ftbert.load(folder, dtype=dtype)
    except (ValueError, RuntimeError) as error:
        if "CPU" not in str(error):
            raise
        pytest.skip(str(error))
    batch = make_batch(model, "encoder", "right")
    want = exact(**batch).last_hidden_state
    cosine = torch.nn.functional.cosine_similarity(narrow(**batch).last_hidden_state, want, dim=-1)
    kept = cosine[batch["attention_mask"].bool()]
    assert kept.mean() > 0.99 and kept.min() > 0.9
