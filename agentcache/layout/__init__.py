"""Messages and tools to token ids and named spans. Knows nothing of models or stores; `renderer.py` is the conductor."""

from .renderer import Renderer, Volatile
from .tokenise import in_transformers_form

__all__ = ["Renderer", "Volatile", "in_transformers_form"]
