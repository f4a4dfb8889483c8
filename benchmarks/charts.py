"""Charts as SVG text, without a library: they go into files and into the page alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Told apart without colour vision too (Okabe and Ito); ftbert's is the first.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#555555")
_TEXT = 'font-family="system-ui, sans-serif" fill="currentColor"'
Series = Mapping[str, Sequence[float | None]]  # by name, a value for each group; None: no bar


def bars(title: str, groups: Sequence[str], series: Series, unit: str = "", line_at: float | None = None) -> str:
    """Groups of horizontal bars, one bar for each series; line_at draws a rule, for instance at "as fast as"."""
    thick, gap, left, width, top = 13, 14, room_for(groups), 560, 62
    height_of_group = thick * len(series) + gap
    height = top + height_of_group * len(groups) + 20
    most = max((v for values in series.values() for v in values if v is not None), default=1.0) or 1.0
    parts = _head(title, left + width + 70, height) + legend(list(series))
    for g, group in enumerate(groups):
        y = top + g * height_of_group
        middle = y + thick * len(series) / 2 + 4
        parts.append(_label(left - 10, middle, group))
        for s, (name, values) in enumerate(series.items()):
            value = values[g]
            if value is None:
                continue
            long = max(1.0, width * value / most)
            at = y + s * thick
            parts.append(
                f'<rect x="{left}" y="{at}" width="{long:.1f}" height="{thick - 2}" fill="{colour(s)}">'
                f"<title>{escape(group)}, {escape(name)}: {value:.3g}{unit}</title></rect>"
                f'<text x="{left + long + 4:.1f}" y="{at + 9}" font-size="10" {_TEXT}>{value:.3g}{unit}</text>'
            )
    if line_at is not None and line_at <= most:
        x = left + width * line_at / most
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{height - 16}" '
            'stroke="currentColor" stroke-dasharray="3 3"/>'
        )
    return "\n".join([*parts, "</svg>"])


def stacks(title: str, groups: Sequence[str], series: Series) -> str:
    """One horizontal bar for each group, all of one length: the shares of its series."""
    thick, left, width, top = 22, room_for(groups), 560, 62
    height = top + thick * len(groups) + 20
    parts = _head(title, left + width + 70, height) + legend(list(series))
    for g, group in enumerate(groups):
        y, x = top + g * thick, float(left)
        total = sum(values[g] or 0.0 for values in series.values()) or 1.0
        parts.append(_label(left - 10, y + 14, group))
        for s, (name, values) in enumerate(series.items()):
            value = values[g] or 0.0
            share = value / total
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width * share:.1f}" height="{thick - 4}" fill="{colour(s)}">'
                f"<title>{escape(group)}, {escape(name)}: {value:.3f} ms, {share:.0%}</title></rect>"
            )
            if share > 0.06:
                middle = x + width * share / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{y + 13}" text-anchor="middle" font-size="10" '
                    f'font-family="system-ui, sans-serif" fill="{_on(colour(s))}">{share:.0%}</text>'
                )
            x += width * share
        parts.append(f'<text x="{left + width + 6}" y="{y + 14}" font-size="10" {_TEXT}>{total:.3g} ms</text>')
    return "\n".join([*parts, "</svg>"])


def dots(
    title: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    series: Series,
    unit: str = "",
    line_at: float | None = None,
) -> str:
    """For more points than bars can show: one dot for each series above each tick, on a logarithmic scale. groups: a
    name and its ticks, from left to right; a series has a value for each tick of all groups."""
    step, gap, left, top, tall = 24, 5, 44, 72, 230
    widths = [max(step * len(ticks), 6 * len(name)) for name, ticks in groups]
    width, bottom = sum(widths) + gap * (len(groups) - 1), top + tall
    found = [v for values in series.values() for v in values if v] + [line_at or 1.0]
    low, high = math.log(min(found) / 1.1), math.log(max(found) * 1.1)

    def height(value: float) -> float:
        return bottom - tall * (math.log(value) - low) / (high - low)

    parts = _head(title, left + width + 10, bottom + 42) + legend(list(series))
    for mark in [m * 10.0**power for power in range(-3, 5) for m in (1, 1.5, 2, 3, 5, 7)]:
        if low <= math.log(mark) <= high:
            y, rule = height(mark), "0.9" if mark == line_at else "0.15"
            parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="currentColor" stroke-opacity="{rule}"/>')
            parts.append(_label(left - 5, y + 4, f"{mark:g}{unit}", size=10))
    apart = min(4.0, 16 / max(1, len(series)))
    begin, first = float(left), 0
    for (group, ticks), wide in zip(groups, widths, strict=True):
        middle = begin + wide / 2
        parts.append(
            f'<rect x="{begin:.1f}" y="{top}" width="{wide}" height="{tall}" fill="currentColor" fill-opacity="0.05"/>'
        )
        parts.append(_label(middle, bottom + 34, group, "middle", 11))
        at = [middle + step * (i - (len(ticks) - 1) / 2) for i in range(len(ticks))]
        parts += [_label(x, bottom + 16, tick, "middle", 10) for x, tick in zip(at, ticks, strict=True)]
        for s, (name, values) in enumerate(series.items()):
            shift = apart * (s - (len(series) - 1) / 2)
            here = [(x + shift, tick, v) for x, tick, v in zip(at, ticks, values[first:], strict=False) if v]
            line = " ".join(f"{x:.1f},{height(v):.1f}" for x, _, v in here)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour(s)}" stroke-opacity="0.5"/>')
            parts += [
                f'<circle cx="{x:.1f}" cy="{height(v):.1f}" r="3" fill="{colour(s)}">'
                f"<title>{escape(group)}, {escape(tick)}, {escape(name)}: {v:.3g}{unit}</title></circle>"
                for x, tick, v in here
            ]
        begin, first = begin + wide + gap, first + len(ticks)
    return "\n".join([*parts, "</svg>"])


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _on(background: str) -> str:
    """Black or white, whichever can be read there."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def room_for(labels: Sequence[str]) -> int:
    """Left of a chart, for labels of size 12, of which no character is wider than 0.6 of that on average."""
    return max(190, 20 + math.ceil(0.6 * 12 * max(map(len, labels), default=0)))


def legend(names: Sequence[str]) -> list[str]:
    """Above a chart, in one line or two."""
    parts, x, y = [], 10.0, 36
    for s, name in enumerate(names):
        if x + 20 + 6.4 * len(name) > 810:
            x, y = 10.0, y + 16
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="11" height="11" fill="{colour(s)}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y}" font-size="11" {_TEXT}>{escape(name)}</text>')
        x += 30 + 6.4 * len(name)
    return parts


def _label(x: float, y: float, text: str, anchor: str = "end", size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" {_TEXT}>{escape(text)}</text>'


def _head(title: str, width: float, height: float) -> list[str]:
    """At least as wide as the title and a line of the legend."""
    width = max(width, 820, 20 + 0.6 * 14 * len(title))
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(title)}" color="#222">',
        f'<text x="10" y="18" font-size="14" font-weight="600" {_TEXT}>{escape(title)}</text>',
    ]
