"""Draw the Transformer: ``python docs/_diagram.py`` writes docs/images/transformer.svg."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parent / "images" / "transformer.svg"
WIDTH, HEIGHT, BOX, GAP = 200, 560, 34, 16
ATTENTION, OTHER = "#cfe2f3", "#eeeeee"
#: The steps of each half from below, and whether a step is attention.
ENCODER = [("self-attention", True), ("feed-forward", False)]
DECODER = [("causal self-attention", True), ("cross-attention", True), ("feed-forward", False)]


def box(x: float, y: float, text: str, fill: str = OTHER) -> str:
    """Return a box with its text, of which (x, y) is the upper left corner."""
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{BOX}" rx="5" fill="{fill}" stroke="#555"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + BOX / 2 + 5}" text-anchor="middle">{text}</text>'
    )


def arrow(*points: tuple[float, float]) -> str:
    """Return a line along points, with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#555" marker-end="url(#head)"/>'


def half(x: float, steps: list[tuple[str, bool]], name: str, below: str) -> tuple[str, dict[str, float], float]:
    """Return one half of the model, the middle of each step, and where its stack ends above."""
    middle, y, places = x + WIDTH / 2, HEIGHT - 80, {}
    parts = [f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{below}</text>']
    parts += [arrow((middle, HEIGHT - 24), (middle, y + BOX)), box(x, y, "embedding + positions")]
    bottom = y - 22
    for text, attention in steps:
        top = y - 2 * (BOX + GAP) - 14
        joint = top + BOX + GAP
        parts += [arrow((middle, y), (middle, joint + BOX)), box(x, joint, text, ATTENTION if attention else OTHER)]
        parts += [arrow((middle, joint), (middle, top + BOX)), box(x, top, "add, normalize")]
        side = x - 14
        parts.append(
            arrow((middle, joint + BOX + 9), (side, joint + BOX + 9), (side, top + BOX / 2), (x, top + BOX / 2))
        )
        places[text], y = joint + BOX / 2, top
    frame = f'<rect x="{x - 24}" y="{y - 12}" width="{WIDTH + 36}" height="{bottom - y + 18}" rx="8" '
    parts.append(frame + 'fill="none" stroke="#555" stroke-dasharray="5 4"/>')
    parts.append(f'<text x="{x - 24}" y="{y - 20}" font-weight="bold">{name}</text>')
    return "".join(parts), places, y


def transformer() -> str:
    """Return the diagram of an encoder–decoder as SVG."""
    left, right = 40, 330
    encoder, _, above = half(left, ENCODER, "encoder, N times", "source tokens")
    decoder, places, top = half(right, DECODER, "decoder, N times", "target tokens so far")
    middle, cross = right + WIDTH / 2, places["cross-attention"]
    lift = above - 44
    parts = [encoder, decoder]
    turn = left + WIDTH + 36
    parts.append(
        arrow((left + WIDTH / 2, above), (left + WIDTH / 2, lift), (turn, lift), (turn, cross), (right, cross))
    )
    parts.append(f'<text x="{left + WIDTH / 2}" y="{lift - 8}" text-anchor="middle">keys and values</text>')
    last = top - 84
    parts += [arrow((middle, top), (middle, last + BOX)), box(right, last, "linear, softmax")]
    parts += [arrow((middle, last), (middle, last - 24))]
    parts.append(f'<text x="{middle}" y="{last - 32}" text-anchor="middle">next token</text>')
    start = last - 56
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {start} 560 {HEIGHT - start}" '
        'font-family="sans-serif" font-size="14" role="img" aria-label="The Transformer: encoder and decoder">'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>'
        f'<rect x="0" y="{start}" width="560" height="{HEIGHT - start}" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(transformer(), encoding="utf-8")
