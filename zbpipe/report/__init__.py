"""Reports: planned over measured, in one self-contained HTML file."""

from .html import Entry, html

__all__ = ["Entry", "html"]
