"""Trains the embedded model from nothing but this folder: python examples/embedded/train.py --out FOLDER --hours 12 --resume

Interrupt it whenever you like (Ctrl-C, SIGTERM): it saves and exports; --resume goes on. FOLDER gets the tokenizer,
checkpoint.safetensors, losses.csv, evaluations.csv, losses.png and, at the end, model/ as a Hugging Face folder in bf16.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--hours", type=float, default=12.0, help="budget of hours spent on steps")
    parser.add_argument("--tokens", type=float, default=1e12, help="budget of tokens, for a run that does not depend on the machine")
    parser.add_argument("--threads", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="learning rate after the warm-up")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--decay", type=float, default=0.25, help="last part of the budget, over which the rate goes down")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--mlp", type=int, default=512, help="width inside the feed-forward layers")
    parser.add_argument(
        "--head-dim", type=int, default=32, help="channels of a head; with --resume, twice those of the checkpoint widens it"
    )
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True, help="Muon, or AdamW, for the layers' matrices")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--evaluate-minutes", type=float, default=30.0, help="of training, as --hours counts it")
    parser.add_argument("--pause-file", type=Path, default=None, help="while it exists, no steps are made (default: FOLDER.pause)")
    parser.add_argument("--resume", action="store_true", help="go on from FOLDER's checkpoint if there is one")
    parser.add_argument(
        "--begin-from",
        type=Path,
        default=None,
        help="without a checkpoint, go on from an exported model's weights; more --layers than it has are added",
    )
    parser.add_argument(
        "--renew", action="store_true", help="with --begin-from, once: new embeddings for parts of words that were never read"
    )
    given = parser.parse_args()
    if given.renew and given.begin_from is None:
        parser.error("--renew is about an exported model's weights: name its folder with --begin-from")
    return given


def main() -> None:
    given = options()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path[0] = str(ROOT)  # this folder's modules are a package, and some are named like others' (tokenizer, model)
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from examples.embedded.stream import stage_at
    from examples.embedded.trainer import Plan, State, Training, round_factors

    values = vars(given)
    values["pause_file"] = given.pause_file or given.out.with_name(f"{given.out.name}.pause")
    round_factors()
    console = Console(width=None if sys.stdout.isatty() else 200)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[said]}"), console=console) as progress:
        progress.live.auto_refresh = console.is_terminal
        training = Training(Plan(**values), lambda text: console.print(text, highlight=False))
        task = progress.add_task("training", total=1.0, said="")

        def each(state: State, loss: float, mean: float) -> None:
            used = max(state.hours / given.hours, state.tokens / given.tokens)
            speed = state.tokens / max(state.hours, 1e-9) / 3600
            tools = stage_at(state.tokens).tools
            said = f"step {state.step}, {state.tokens / 1e6:.2f} M tokens, {speed:.0f}/s, loss {mean:.3f}, up to {tools} tools"
            progress.update(task, completed=used, said=said)
            if not console.is_terminal and state.step % 20 == 0:
                console.print(f"{state.hours:.3f} h, {said}", highlight=False)

        training.run(each)


if __name__ == "__main__":
    main()
