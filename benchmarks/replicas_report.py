"""What a result of bench_replicas.py says. Needs no torch."""

from __future__ import annotations

from typing import Any

from result_pages import markdown


def lines_of(document: dict[str, Any]) -> list[str]:
    packages = document["provenance"]["packages"]
    name = document.get("tokenizer", "nanotoken" if packages.get("nanotoken") else "tokenizers")
    tokenizer = f"{name} {packages[name]}"
    rows = [
        [row["name"], f"{row['texts_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}", f"{row['times_one']:.2f}"]
        for row in document["rows"]
    ]
    lines = markdown(([tokenizer, "texts/s", "tokens/s", "times one"], rows)).splitlines()
    shares = ", ".join(f"{name}: {count}" for name, count in document["batches"].items())
    texts = f"{document['texts']:,} texts of {document['tokens'] / document['texts']:.0f} tokens"
    return [*lines, "", f"{texts}; batches of {shares}; least cosine {document['least_cosine']:.6f}"]
