"""The small trained agent model of this project: where its folder is, and whether it is whole. Knows nothing of models.

`Engine("embedded")` loads it; `folder()` is an ordinary Hugging Face folder. Its README.md is the model card, SHA256SUMS names every
file; examples/embedded makes all of it from a seed.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ..errors import ModelLoadError

__all__ = ["NAME", "SUMS", "checked", "folder", "seal", "sums"]

NAME = "embedded"
SUMS = "SHA256SUMS"
_FOLDER = Path(__file__).parent / "model"


def folder() -> Path:
    """The model's folder, each of its files verified (once per process); ModelLoadError names missing and damaged files."""
    return _verified(_FOLDER)


def checked(path: Path) -> Path:
    """The folder, if its files are what its SHA256SUMS says, no more and no less."""
    again = "install agentcache-llm again, or make the folder with examples/embedded/export.py"
    if not path.is_dir():
        raise ModelLoadError(
            f"this version comes without the embedded model's weights ({str(path)!r} is not there): train it with "
            "examples/embedded/train.py and make the folder with examples/embedded/export.py, or name another model"
        )
    try:
        lines = (path / SUMS).read_text("utf-8").splitlines()
    except OSError as error:
        raise ModelLoadError(f"the embedded model's {SUMS} cannot be read in {str(path)!r}: {error}; {again}") from error
    wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines if line)}
    found = sums(path)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong or not wanted:
        raise ModelLoadError(f"the embedded model's files {wrong!r} in {str(path)!r} differ from {SUMS}: {again}")
    return path


_verified = functools.cache(checked)


def sums(path: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder, but for SHA256SUMS itself."""
    out: dict[str, str] = {}
    for file in sorted(path.iterdir()):
        if file.name != SUMS and file.is_file():
            with open(file, "rb") as opened:
                digest = hashlib.sha256()
                while piece := opened.read(1 << 20):
                    digest.update(piece)
            out[file.name] = digest.hexdigest()
    return out


def seal(path: Path) -> None:
    """Write SHA256SUMS for the files of the folder."""
    (path / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums(path).items()), "utf-8")
