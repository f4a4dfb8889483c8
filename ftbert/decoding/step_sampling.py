"""From logits to the next token: the most likely one, or one drawn as temperature, top_k, top_p and min_p say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftbert.decoding.chosen import sent
from ftbert.decoding.sampling import Sampling


def generator_of(sampling: Sampling) -> torch.Generator | None:
    """Of one text: each has its own, so that it does not depend on what runs beside it. None where nothing is drawn."""
    if sampling.greedy:
        return None
    made = torch.Generator()
    if sampling.seed is None:
        made.seed()
    else:
        made.manual_seed(sampling.seed)
    return made


_IN_CACHE = 1 << 17  # numbers, of 8 bytes
_SOME = 64  # of the most likely tokens, which mostly are enough for top_p


class StepSampling:
    """How the next tokens of the same texts are chosen, step after step: values lie on the device of the logits."""

    def __init__(self, texts: Sequence[Sampling], device: torch.device) -> None:
        """texts: by row of the logits."""
        drawn = [row for row, one in enumerate(texts) if not one.greedy]
        found, self._device = [texts[row] for row in drawn], device
        self._rows = None if len(drawn) == len(texts) else sent(torch.tensor(drawn, dtype=torch.int64), device)
        self._draws = bool(drawn)
        if not drawn:
            return
        self._temperature = self._column([one.temperature for one in found])
        # What keeps all tokens, for rows beside those that leave some out.
        self._most = max((one.top_k or 0 for one in found), default=0)
        self._top_k = self._column([one.top_k or 0 for one in found]).long()
        cuts = [None if one.top_p == 1 else one.top_p for one in found]
        self._top_p = self._column([one or torch.inf for one in cuts]) if any(cuts) else None
        self._min_p = self._column([one.min_p or 0.0 for one in found]) if any(one.min_p for one in found) else None

    def _column(self, values: Sequence[float]) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.float64)[:, None], self._device)

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """logits [texts, vocab], contiguous -> int64 [texts], found where they lie; -1 where logits are not finite.
        generators: of the texts that are not greedy."""
        ids: Tensor = torch.ops.ftbert.argmax(logits)
        if not self._draws:
            return ids
        # The host's generators, so that a seed draws alike on every device; a number a text is all that is sent.
        numbers = torch.stack([torch.rand((), dtype=torch.float64, generator=one) for one in generators])
        some = logits if self._rows is None else logits.index_select(0, self._rows)
        numbers = sent(numbers, logits.device)
        # On a CPU so many rows at a time as its cache holds.
        count = max(1, _IN_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(numbers)
        parts = [slice(first, first + count) for first in range(0, len(numbers), count)]
        drawn = torch.cat([draw(self.weights(some[one], one), numbers[one]) for one in parts])
        if self._rows is not None:
            drawn = ids.index_copy(0, self._rows, drawn)
        return drawn.where(ids >= 0, -1)

    def weights(self, logits: Tensor, rows: slice = slice(None)) -> Tensor:
        """logits [those rows of the texts that are not greedy, vocab] -> float64, in proportion to the probabilities of
        the tokens that may be drawn; 0 of the others. Of equally likely tokens all are left out or none. What one text
        leaves out changes no bit of another's."""
        logits = logits.double()
        logits = (logits - logits.amax(-1, keepdim=True)) / self._temperature[rows]  # no overflow where it is small
        if self._most:
            most, top_k = min(self._most, logits.shape[1]), self._top_k[rows]
            least = logits.topk(most).values.gather(1, (top_k - 1).clamp(0, most - 1))
            logits = logits.masked_fill(logits < least.masked_fill(top_k == 0, -torch.inf), -torch.inf)
        likely = logits.softmax(-1)
        if self._top_p is not None:
            likely = likely.masked_fill(likely < self._least_likely(likely, self._top_p[rows]), 0)
        if self._min_p is not None:
            likely = likely.masked_fill(likely < self._min_p[rows] * likely.amax(-1, keepdim=True), 0)
        return likely

    def _least_likely(self, likely: Tensor, share: Tensor) -> Tensor:
        """float64 [texts, 1]: the last of the most likely ones that together have so large a share [texts, 1]; 0 where
        that is infinite."""
        vocab, asked = likely.shape[1], share.where(share < torch.inf, 0)
        # A GPU's host would wait to see whether some are enough.
        count = _SOME if likely.device.type == "cpu" else vocab
        while True:
            falling = likely.topk(count).values if count < vocab else likely.sort(-1, descending=True).values
            sums = falling.cumsum(-1)
            if count >= vocab or bool((sums[:, -1:] >= asked).all()):
                break
            count = min(16 * count, vocab)
        kept = (sums - falling < share).sum(-1, keepdim=True)  # the first always, but of numbers that are not finite
        return falling.gather(1, (kept - 1).clamp(min=0)).masked_fill(share == torch.inf, 0)


def draw(likely: Tensor, numbers: Tensor) -> Tensor:
    """likely float64 [texts, ids], numbers float64 [texts] in [0, 1) -> of each text the first id up to which the sum
    of probabilities passes the number: never one of probability 0."""
    sums = likely.cumsum(-1)
    return torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
