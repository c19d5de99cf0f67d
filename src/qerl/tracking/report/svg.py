"""Build SVG files and texts, around curves too; the style sheet is the caller's."""

from collections.abc import Sequence
from html import escape


def svg_document(width: int, height: int, parts: Sequence[str]) -> str:
    """Return a file of these parts, a line each; width and height in pixels."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def svg_text(x: float, y: float, text: str, name: str, anchor: str) -> str:
    """Return a text at (x, y) with the CSS class `name`; anchor: start, middle or end."""
    return f'<text class="{name}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def shapes_of(svg: str) -> str:
    """Return what an SVG has inside, to be placed in another."""
    return svg[svg.index(">") + 1 :].removesuffix("</svg>")
