"""Where this checkout lies, for tests that read its files or run programs in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
