"""Makes the package's model folder from a training: python examples/embedded/export.py FOLDER [--quality quality.json ...] [--to DIR]

FOLDER is what train.py writes to. Three quarters of the last weights and a quarter of the averaged ones go out in bf16, with tokenizer,
chat template, model card and checksums.
--quality: what `python -m benchmarks.quality --json` wrote for these weights; several runs may be named, each cell is of the longest.
Without it the card says that nothing was measured yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def export(trained: Path, to: Path, quality: Sequence[Path] = ()) -> Path:
    """Writes the folder beside its place first: it is there whole, or as it was."""
    from agentcache import embedded
    from examples.embedded import card, checkpoints
    from examples.embedded.tokenizer import load

    measured = card.joined([json.loads(path.read_text("utf-8")) for path in quality]) if quality else None
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as made:
        folder = Path(made) / "model"
        trainer = checkpoints.export_checkpoint(trained / "checkpoint.safetensors", folder, load(trained / "tokenizer"))
        (folder / "README.md").write_text(card.card(trainer, checkpoints.size(folder), measured), "utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)
        embedded.seal(folder)
        embedded.checked(folder)
        if to.exists():
            to.rename(Path(made) / "before")  # goes with the folder that it was made in
        folder.rename(to)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path, help="the folder of train.py")
    parser.add_argument("--quality", type=Path, action="append", default=[], help="figures for the card")
    parser.add_argument("--to", type=Path, default=ROOT / "agentcache" / "embedded" / "model")
    given = parser.parse_args()
    sys.path[0] = str(ROOT)
    for file in sorted(export(given.trained, given.to, given.quality).iterdir()):
        print(f"{file.stat().st_size:>12,}  {file}")


if __name__ == "__main__":
    main()
