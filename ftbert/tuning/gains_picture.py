"""What tuning brought, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ftbert.tuning.gemm_rows import Row


def picture(rows: Sequence[Row]) -> str:
    """SVG of some rows: a strip for each product, m from left to right on a logarithmic scale, the darker the more was
    gained or, in red, lost."""
    wanted = sorted({row.product for row in rows})
    first, last = min(row.first for row in rows), max(row.last for row in rows)
    left, width, step, top = 300, 900, 26, 40
    below = top + step * len(wanted)

    def at(m: float) -> float:
        return left + width * math.log(m / first) / math.log((last + 1) / first)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{below + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20" font-size="14">Gain over cuBLASLt\'s first proposal, in E4M3 over the rule\'s choice, by '
        "rows m (gray: none, dark green: 20 % and more, red: a loss)</text>",
    ]
    for y, product in enumerate(wanted):
        parts.append(f'<text x="10" y="{top + step * y + 17}">{product}</text>')
        for row in (row for row in rows if row.product == product):
            ends = [*((one + next) / 2 for one, next in pairwise(row.timed)), row.last + 1]
            low: float = row.first
            for m, us, default, high in zip(row.timed, row.us, row.default_us, ends, strict=False):
                gain = default / us - 1
                parts.append(
                    f'<rect x="{at(low):.1f}" y="{top + step * y}" width="{max(0.5, at(high) - at(low)):.1f}" '
                    f'height="{step - 2}" fill="{_colour(gain)}"><title>{product}, m={m}: {gain:.1%}</title></rect>'
                )
                low = high
    powers = [1 << bits for bits in range((first - 1).bit_length(), last.bit_length())]
    for mark in powers if len(powers) > 1 else sorted({first, last}):
        parts.append(f'<line x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="{top}" y2="{below + 4}" stroke="#999"/>')
        parts.append(f'<text x="{at(mark):.1f}" y="{below + 20}" text-anchor="middle">{mark}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(gain: float) -> str:
    share = min(1.0, abs(gain) / 0.2)
    if gain < 0:  # the least loss is seen
        return f"rgb({250 - 50 * share:.0f},{205 - 165 * share:.0f},{205 - 165 * share:.0f})"
    return f"rgb({235 - 215 * share:.0f},{235 - 115 * share:.0f},{235 - 115 * share:.0f})"
