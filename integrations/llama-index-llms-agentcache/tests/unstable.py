"""A tool whose description differs from process to process as LlamaIndex writes it. Annotations are not postponed: it reads them."""

from typing import Any


class Config:
    """An object without a repr of its own."""


KINDS = {"log", "chart", "tide", "wind", "wave", "fog"}


def fetch(words: str, config: Any = Config(), kinds: set[str] = KINDS, nested: Any = ({"b", "a"},)) -> str:  # noqa: B008
    """Look something up. The register at 0x40 stays as it is."""
    return words
