"""Charts of tokens a second, each peer beside the others on one machine: README's and those of docs/benchmarks.md.

    python benchmarks/speed_chart.py            writes docs/speed*.svg
    python benchmarks/speed_chart.py --check    says whether they are what the results give

An SVG of text and bars, which needs no fonts and no library. It follows the reader's light or dark setting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from report import ROOT, instructions, label, load_runs, point_name

WIDTH, NAMES, VALUES = 720, 236, 92  # pixels: the whole, the column of names, the numbers behind the longest bar
BAR, GAP, HEAD = 13, 9, 58  # a bar's height, the space below a peer, a panel's two lines of words
STYLE = """
  text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328; }
  .card { fill: #ffffff; stroke: #d0d7de; } .head { font-weight: 600; } .soft { fill: #59636e; font-size: 14px; }
  .value { font-size: 13px; fill: #59636e; } .ours { font-weight: 600; }
  .a { fill: #9aa4af; } .b { fill: #c8ced5; } .a.ours { fill: #3f51b5; } .b.ours { fill: #8c9be8; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .card { fill: #14181f; stroke: #3d444d; } .soft, .value { fill: #9da7b3; }
    .a { fill: #6b7685; } .b { fill: #424b57; } .a.ours { fill: #8c9be8; } .b.ours { fill: #5563c1; }
  }
"""


@dataclass(frozen=True)
class Panel:
    """Two points of one run. peers: the name in the results -> the one that is shown; ours first."""

    run: str
    model: str
    points: tuple[tuple[str, str], tuple[str, str]]  # of the results, in words
    peers: dict[str, str]


GPU_POINTS = (("base 32x128 half", "half full"), ("base 32x128 full", "full"))
CPU_POINTS = (("base 16x128 ragged", "ragged"), ("base 16x128 full", "full"))
PACKED = "packed PyTorch, CUDA graph"
H200 = Panel(
    "cuda-fp16", "BERT-base, 32 texts of up to 128 tokens", GPU_POINTS,
    {
        "ftbert, packed": "ftbert", PACKED: "packed PyTorch, compiled",
        "nn.TransformerEncoder fast path": "nn.TransformerEncoder", "transformers (sdpa)": "transformers",
    },
)  # fmt: skip
CPU = "BERT-base, 16 texts of up to 128 tokens"
EPYC = Panel(
    "cpu-fp32", CPU, CPU_POINTS,
    {
        "ftbert": "ftbert", "CTranslate2 fp32": "CTranslate2", "OpenVINO fp32": "OpenVINO",
        "onnxruntime fp32": "onnxruntime", "transformers (sdpa)": "transformers", "torch.compile": "torch.compile",
    },
)  # fmt: skip
AVX2 = Panel("cpu-fp32-avx2", CPU, CPU_POINTS, {k: v for k, v in EPYC.peers.items() if k != "torch.compile"})
AMX = Panel(
    "cpu-bf16-amx", CPU, CPU_POINTS,
    {
        "ftbert": "ftbert", "OpenVINO bf16": "OpenVINO", "transformers (sdpa)": "transformers",
        "torch.compile": "torch.compile", "nn.TransformerEncoder fast path": "nn.TransformerEncoder",
    },
)  # fmt: skip
INT8 = Panel(
    "cpu-int8", CPU, CPU_POINTS,
    {
        "ftbert": "ftbert", "CTranslate2 int8": "CTranslate2", "OpenVINO int8": "OpenVINO",
        "onnxruntime int8": "onnxruntime", "torch dynamic int8": "torch, dynamic",
    },
)  # fmt: skip
FP8 = Panel(
    "cuda-fp8", "BERT-large, 32 texts of up to 384 tokens",
    (("large 32x384 half", "half full"), ("large 32x384 full", "full")),
    {
        "ftbert, packed": "ftbert, fp8", "ftbert, packed, 16 bits": "ftbert, 16 bits",
        f"packed PyTorch, fp8 scales of tensors, {PACKED[16:]}": "packed PyTorch, fp8",
        f"packed PyTorch, 16 bits, {PACKED[16:]}": "packed PyTorch, 16 bits",
    },
)  # fmt: skip
MODERN = Panel(
    "cuda-bf16-modern", "ModernBERT-base, 32 texts",
    (("modernbert 32x128 half", "of 128, half full"), ("modernbert 32x512 full", "of 512, full")),
    {
        "ftbert, packed, recorded": "ftbert, recorded",
        "packed PyTorch compiled as a whole, CUDA graph": "packed PyTorch, whole",
    },
)  # fmt: skip
CHARTS = {
    "speed": (H200, EPYC),
    "speed-hopper": (H200, MODERN, FP8),
    "speed-cpu": (EPYC, AVX2, AMX, INT8),
}


def amount(tokens: float) -> str:
    """Three digits, with large thousands and millions by their letters."""
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if tokens >= 10 * size or tokens >= size > 1e3:
            return f"{tokens / size:.3g}{letter}"
    return f"{float(f'{tokens:.3g}'):,.0f}"


def machine_words(document: dict[str, Any]) -> str:
    """The device, as its run had it, and the type."""
    facts = document["provenance"]
    if "gpu" in facts:
        return f"{facts['gpu'].removesuffix(' 80GB HBM3')}, {facts['dtype']}"
    run = document["files"][0].removesuffix("-base")
    return f"{facts['threads']} threads of {instructions(run, facts)}, {facts['dtype']}"


def rates(document: dict[str, Any], panel: Panel) -> Iterator[tuple[str, list[float | None]]]:
    """Tokens a second of each peer at the points; None where it did not run. ValueError where its results
    are off."""
    results = {point_name(result): result for result in document["results"]}
    for peer, shown in panel.peers.items():
        if label(document, peer) != peer:
            raise ValueError(f"{panel.run}: {label(document, peer)} is no peer of a chart")
        found = [(results[point]["tokens"], results[point]["peers"].get(peer, {})) for point, _ in panel.points]
        yield shown, [1000 * tokens / row["ms"] if "ms" in row else None for tokens, row in found]


def drawn(panel: Panel, top: float) -> tuple[list[str], float, str]:
    """The panel's elements, where it ends, and its numbers in a sentence."""
    document = load_runs(f"{panel.run}*.json")[panel.run]
    rows = [*rates(document, panel)]
    most = max(value for _, values in rows for value in values if value)
    machine = machine_words(document)
    lines = [
        f'<text x="24" y="{top + 20}" class="head">{escape(machine)}</text>',
        f'<text x="24" y="{top + 41}" class="soft">{escape(panel.model)}: tokens/s</text>',
    ]
    x = WIDTH - 24.0
    for style, (_, words) in zip("ba", reversed(panel.points), strict=True):
        x -= 8 * len(words) + 34
        lines += [
            f'<rect x="{x}" y="{top + 31}" width="11" height="11" class="{style} ours"/>',
            f'<text x="{x + 16}" y="{top + 41}" class="soft">{escape(words)}</text>',
        ]
    top += HEAD
    told = []
    for place, (name, values) in enumerate(rows):
        ours = " ours" if not place else ""
        lines.append(f'<text x="24" y="{top + 18}" class="name{ours}">{escape(name)}</text>')
        for style, value in zip("ab", values, strict=True):
            width = (WIDTH - NAMES - VALUES) * (value or 0) / most
            text = amount(value) if value else "did not run"
            lines += [
                f'<rect x="{NAMES}" y="{top}" width="{width:.1f}" height="{BAR - 1}" rx="1.5" class="{style}{ours}"/>',
                f'<text x="{NAMES + width + 6:.1f}" y="{top + 11}" class="value">{text}</text>',
            ]
            top += BAR
        told.append(f"{name} {' and '.join(amount(value) if value else 'none' for value in values)}")
        top += GAP
    return (
        lines,
        top,
        f"{machine}, {panel.model}, {' and '.join(words for _, words in panel.points)}: {', '.join(told)}.",
    )


def render(panels: tuple[Panel, ...]) -> str:
    """The SVG, with its numbers as the description that screen readers say."""
    top, body, told = 20.0, [], []
    for panel in panels:
        lines, top, words = drawn(panel, top)
        body += lines
        told.append(words)
        top += 16
    height = round(top)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>Tokens a second, more is better</title>", f"<desc>{escape(' '.join(told))}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>', *body, "</svg>", "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, differ = parser.parse_args().check, []
    for name, panels in CHARTS.items():
        path, new = ROOT / "docs" / f"{name}.svg", render(panels)
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            differ.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"{'differ' if check else 'wrote'}: {', '.join(differ)}" if differ else "up to date")
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
