"""Writes models.md from the tables in converters/ and the cases of the tests: python docs/make_models.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "models.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

_TASKS = {
    "encoder": "encoder",
    "sequence_classification": "sequence class.",
    "token_classification": "token class.",
    "question_answering": "question answering",
    "masked_lm": "masked LM",
    "multiple_choice": "multiple choice",
    "next_sentence": "next sentence",
    "sentence_order": "sentence order",
    "replaced_token": "replaced token",
}


def render() -> str:
    from families import CASES, SIZES, make_config

    from ftbert.converters.families import REFUSED, find_family
    from ftbert.converters.family import Derived

    tested = set(CASES)
    lines = [
        "# What runs",
        "",
        "Written by `docs/make_models.py` from the tables in `converters/` and the cases of `tests/test_families.py`;",
        f"do not edit. Every \u2713 is a test: random weights, {len(SIZES)} sizes (in one no dimension is a multiple",
        "of 4), right- and left-padded masks and masks with holes, against transformers in float32.",
        "",
        "| model type | " + " | ".join(_TASKS.values()) + " |",
        "|---|" + ":-:|" * len(_TASKS),
    ]
    families = sorted({family for family, _ in CASES})
    for family in families:
        marks = ["\u2713" if (family, task) in tested else "" for task in _TASKS]
        lines.append(f"| {family} | " + " | ".join(marks) + " |")
    head = "| model type | LayerNorm | positions | token types | pooler | besides |"
    lines += ["", head, "|---" * 6 + "|"]
    for family in families:
        table = find_family(make_config(family, 0).to_dict())
        config = table.config(make_config(family, 0).to_dict())
        besides = [
            ("embedding projection", "embeddings.projection" in table.names),
            ("layers share weights", config.distinct_layers > 0),
            ("relative position bias", config.relative_span > 0),
            ("no LayerNorm over the embeddings", not config.embedding_norm),
            ("task types, always 0", isinstance(table.names.get("embeddings.token_type"), Derived)),
        ]
        positions = {"absolute": "column", "from_padding": "counted from the padding id", "none": "none"}
        cells = [
            family, config.norm_place, positions[config.positions], "yes" if config.token_types else "no",
            "yes" if "pooler" in table.names else "no", "; ".join(text for text, there in besides if there),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Any sizes; hidden must be a multiple of heads.",
        "Activations: gelu (erf), gelu_new and its other spellings (tanh), relu, silu, tanh.",
        "",
        "Refused, with the reason in the error:",
        "",
        *(f"- {kind}: {reason}" for kind, reason in sorted(REFUSED.items())),
        "- decoders (`is_decoder`, `is_causal`, `add_cross_attention`), `position_embedding_type` other than absolute,",
        "  ALBERT with `inner_group_num` over 1, ELECTRA multiple choice with a `summary_type` other than first",
        "- every other model type",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
