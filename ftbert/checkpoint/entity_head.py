"""What a GLiNER has behind its encoder: scores of words, or of runs of words, by labels that stand in the text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftbert.checkpoint.tensors import TensorSource

_PROJECTION, _LSTM, _SPANS = "token_rep_layer.projection", "rnn.lstm", "span_rep_layer.span_rep_layer"


@dataclass(frozen=True)
class EntityHead:
    """Tensors are by the names of the package `gliner`.

    hidden: of words and labels; where the encoder has another, a projection stands between. kind: "marker", "markerV0":
    scores of runs of at most `max_width` words; "token_level": of each word as start, end and inside. lstm_layers: over
    the words, in both directions. entity_token: stands before each label; its id is class_id, -1: the tokenizer's.
    separator: behind the last. label_behind: the token behind entity_token stands for the label. max_words: of a text.
    tokenizer: the folder of its files.
    """

    hidden: int
    kind: str
    max_width: int
    max_words: int
    lstm_layers: int
    entity_token: str
    separator: str
    class_id: int
    label_behind: bool
    tokenizer: Path
    source: TensorSource

    def shapes(self, encoder_hidden: int) -> dict[str, list[int]]:
        """Of the head's tensors, by name."""
        hidden, found = self.hidden, dict[str, list[int]]()

        def linear(name: str, inputs: int, outputs: int) -> None:
            found.update({f"{name}.weight": [outputs, inputs], f"{name}.bias": [outputs]})

        def two(name: str, inputs: int, between: int) -> None:
            linear(f"{name}.0", inputs, between)
            linear(f"{name}.3", between, hidden)

        if hidden != encoder_hidden:
            linear(_PROJECTION, encoder_hidden, hidden)
        half = hidden // 2
        for layer in range(self.lstm_layers):
            for way in ("", "_reverse"):
                place = f"_l{layer}{way}"
                found |= {f"{_LSTM}.{kind}{place}": [4 * half] for kind in ("bias_ih", "bias_hh")}
                found[f"{_LSTM}.weight_ih{place}"] = [4 * half, hidden]
                found[f"{_LSTM}.weight_hh{place}"] = [4 * half, half]
        if self.kind == "token_level":
            linear("scorer.proj_token", hidden, 2 * hidden)
            linear("scorer.proj_label", hidden, 2 * hidden)
            linear("scorer.out_mlp.0", 3 * hidden, 4 * hidden)
            linear("scorer.out_mlp.3", 4 * hidden, 3)
            return found
        wide = (2 if self.kind == "marker" else 4) * hidden
        two(f"{_SPANS}.project_start", hidden, wide)
        two(f"{_SPANS}.project_end", hidden, wide)
        if self.kind == "marker":
            linear(f"{_SPANS}.out_project", 2 * hidden, hidden)
        else:
            two(f"{_SPANS}.out_project", 2 * hidden, 4 * hidden)
        two("prompt_rep_layer", hidden, 4 * hidden)
        return found
