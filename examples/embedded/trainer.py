"""The training loop: packs in, steps out, over processes of one thread each. Knows nothing of what the packs mean.

    worker    draws packs, some steps ahead
    main      deals a step's packs out, computes its part, sums the gradients, steps, writes down what happened
    helper    computes its part on the shared weights

One thread per process: a step has one barrier instead of thousands, which is what a machine shared with others needs.
"""

from __future__ import annotations

import csv
import ctypes
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from transformers import AutoTokenizer

from agentcache.model.numerics import choose_kernel

from . import checkpoints, evaluate, initial, stream
from . import model as models
from .packing import Encoder, Pack
from .tokenizer import load

HALF = choose_kernel(torch.bfloat16, torch.device("cpu")) != "upcast"  # products in bf16, where the processor is faster at them
CHOICE = 2.0  # how much a token on the way to a tool counts: they are few, and the last thing to be learnt
FORK = 6.0  # how much one counts on which all else hangs: whether a rule applies, the beginning of a name


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained, as the command line gives it."""

    out: Path
    hours: float
    tokens: float
    threads: int
    seed: int
    rate: float
    warmup: int
    decay: float
    layers: int
    mlp: int
    head_dim: int
    muon: bool
    save_minutes: float
    evaluate_minutes: float
    pause_file: Path | None
    resume: bool
    begin_from: Path | None
    renew: bool


@dataclass(slots=True)
class State:
    """How far it is. targets: the weights of all tokens with loss; hours: spent on steps, without pauses and evaluations."""

    step: int = 0
    packs: int = 0
    tokens: int = 0
    targets: int = 0
    hours: float = 0.0


def keep_memory() -> None:
    """Freed memory stays with this process: the C library would return each large tensor and have it zeroed anew (a sixth of the time)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library; it has its own ways
    for option, size in ((-3, 1 << 25), (-1, 1 << 30), (-2, 1 << 28)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD of glibc
        mallopt(option, size)


def round_factors() -> None:
    """Products of this process round their factors to bf16 where it is faster, those that stay in float32 too: sums are never rounded."""
    if HALF:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"


class Learner:
    """A model whose gradients lie in one flat tensor."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.set_attn_implementation(models.NAME)
        self.parameters = list(model.parameters())
        self.gradients = torch.zeros(sum(p.numel() for p in self.parameters))
        self.aim()

    def aim(self) -> None:
        """Each parameter's gradient becomes a view of the flat tensor."""
        at = 0
        for parameter in self.parameters:
            parameter.grad = self.gradients[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def learn(self, packs: Sequence[Pack]) -> tuple[float, float]:
        """Sums the gradients over the packs; returns the sum of losses and of the targets' weights."""
        self.gradients.zero_()
        total, count = 0.0, 0.0
        for pack in packs:
            with torch.autocast("cpu", torch.bfloat16, enabled=HALF):
                value, rows = models.loss(self.model, pack, CHOICE, FORK)
            value.backward()
            total, count = total + value.item(), count + rows
        return total, count


def _help(shape: dict[str, int], weights: list[torch.Tensor], gradients: torch.Tensor, pipe: Any) -> None:
    """A helper process: parts of steps, until the pipe closes."""
    keep_memory()
    round_factors()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = models.build(**shape)
    for parameter, shared in zip(model.parameters(), weights):
        parameter.data = shared
    learner = Learner(model)
    while True:
        try:
            packs = pipe.recv()
        except EOFError:
            return
        done = learner.learn(packs)
        gradients.copy_(learner.gradients)
        pipe.send(done)


class Team:
    """The main process's learner and its helpers."""

    def __init__(self, model: Any, helpers: int) -> None:
        model.share_memory()
        self.learner = Learner(model)
        self.pipes: list[Any] = []
        self.sums: list[torch.Tensor] = []
        context = processes.get_context("spawn")
        for _ in range(helpers):
            ours, theirs = context.Pipe()
            shared = torch.zeros_like(self.learner.gradients).share_memory_()
            weights = [parameter.data for parameter in model.parameters()]
            context.Process(target=_help, args=(models.shape(model.config), weights, shared, theirs), daemon=True).start()
            self.pipes.append(ours)
            self.sums.append(shared)

    def learn(self, packs: Sequence[Pack]) -> tuple[float, float]:
        """The gradient of the mean loss over all targets of these packs; the sum of losses and of the targets' weights."""
        parts: list[list[Pack]] = [[] for _ in range(len(self.pipes) + 1)]
        for pack in sorted(packs, key=lambda one: -len(one.ids)):
            min(parts, key=lambda part: sum(len(one.ids) for one in part)).append(pack)
        for pipe, part in zip(self.pipes, parts[1:]):
            pipe.send(part)
        total, count = self.learner.learn(parts[0])
        for pipe, shared in zip(self.pipes, self.sums):
            other, rows = pipe.recv()
            self.learner.gradients += shared
            total, count = total + other, count + rows
        self.learner.gradients /= count
        return total, count


def rate_at(plan: Plan, state: State, first: int = 0) -> float:
    """Warm-up, constant, then down to a hundredth over the last part of the budget of hours or tokens, whichever is nearer its end.

    first: the step at which the optimizers were new.
    """
    used = max(state.hours / plan.hours, state.tokens / plan.tokens)
    left = max(0.0, 1 - used) / plan.decay
    return plan.rate * min(1.0, (state.step - first + 1) / plan.warmup, max(0.01, left))


class Log:
    """losses.csv, evaluations.csv and the plot of both."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.folder = folder
        if fresh:
            self._row("losses.csv", ("step", "tokens", "targets", "hours", "rate", "loss"), "w")
            self._row("evaluations.csv", ("step", "tokens", "hours", "split", "style", "tools", "score", "n", "share"), "w")

    def _row(self, name: str, row: Sequence[object], mode: str = "a") -> None:
        with open(self.folder / name, mode, newline="") as file:
            csv.writer(file).writerow(row)

    def loss(self, state: State, rate: float, value: float) -> None:
        self._row("losses.csv", (state.step, state.tokens, state.targets, f"{state.hours:.4f}", f"{rate:.2e}", f"{value:.5f}"))

    def evaluation(self, state: State, cell: evaluate.Set, scores: dict[str, evaluate.Scores]) -> None:
        for name, score in sorted(scores.items()):
            where = (cell.split, cell.style, cell.tools)
            self._row("evaluations.csv", (state.step, state.tokens, f"{state.hours:.3f}", *where, name, score.n, f"{score.share:.4f}"))

    def plot(self) -> None:
        """losses.png: the loss over tokens, and the shares of right calls and solved dialogues."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with open(self.folder / "losses.csv", newline="") as file:
            losses = [(int(row["tokens"]) / 1e6, float(row["loss"])) for row in csv.DictReader(file)]
        shares: dict[str, list[tuple[float, float]]] = {}
        with open(self.folder / "evaluations.csv", newline="") as file:
            for row in csv.DictReader(file):
                if row["score"] in ("call exact", "solved"):
                    name = f"{row['score']}, {row['style']}, {row['split']}, {row['tools']}"
                    shares.setdefault(name, []).append((int(row["tokens"]) / 1e6, float(row["share"])))
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 9), sharex=True)
        above.semilogy(*zip(*losses), linewidth=0.8)
        above.set_ylabel("loss, weighted mean of target tokens")
        for name, points in sorted(shares.items()):
            below.plot(*zip(*points), marker=".", label=name)
        below.set_xlabel("million tokens")
        below.set_ylabel("share right, validation")
        if shares:
            below.legend(fontsize=7)
        figure.savefig(self.folder / "losses.png", dpi=110)
        pyplot.close(figure)


class Training:
    """One run: constructed means ready to go on where the checkpoint, if any, ended."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        keep_memory()
        torch.set_num_threads(1)
        plan.out.mkdir(parents=True, exist_ok=True)
        self.plan, self.say, self.stopped = plan, say, False
        if plan.begin_from is not None and not (plan.out / "tokenizer").exists():
            AutoTokenizer.from_pretrained(plan.begin_from).save_pretrained(plan.out / "tokenizer")
        self.tokenizer = load(plan.out / "tokenizer")
        self.encoder = Encoder(self.tokenizer)
        self.model = models.build(len(self.tokenizer), layers=plan.layers, mlp=plan.mlp, head_dim=plan.head_dim, seed=plan.seed)
        self.optimizers = models.optimizers(self.model, plan.rate, plan.muon)
        self.checkpoint = plan.out / "checkpoint.safetensors"
        resumed = plan.resume and self.checkpoint.exists()
        if not resumed and plan.begin_from is None:
            begins = self.tokenizer.backend_tokenizer.encode('{"name": "', add_special_tokens=False).ids
            initial.structure(self.model, plan.seed, begins if len(begins) == 1 else ())
        self.average = models.Average(self.model)
        self.state, widened = State(), False
        if resumed:
            state, widened = checkpoints.restore(self.checkpoint, self.model, self.optimizers, self.average)
            self.state = State(**state)
        elif plan.begin_from is not None:
            self.state = State(**checkpoints.begin_from(plan.begin_from, self.model, self.average))
            if plan.renew:  # once: a resumed run keeps what they have learnt since
                tokens = stream.unread(self.encoder, plan.seed)
                checkpoints.renew(self.model, self.average, tokens, plan.seed)
                say(f"new embeddings for {len(tokens)} parts of words that were never read")
        self.first = 0 if resumed and not widened else self.state.step
        self.log = Log(plan.out, fresh=not resumed)
        self.team = Team(self.model, plan.threads - 1)
        self.queue = stream.start(plan.out / "tokenizer", plan.seed, self.state.packs, self.state.tokens)
        size = sum(parameter.numel() for parameter in self.model.parameters())
        say(f"{size:,} parameters, {plan.threads} processes, {'resumed' if resumed else 'new'} at {self.state.tokens / 1e6:.2f} M tokens")

    @property
    def done(self) -> bool:
        return self.stopped or self.state.hours >= self.plan.hours or self.state.tokens >= self.plan.tokens

    def step(self) -> float:
        """One step of the optimizer; returns its loss."""
        state, began, worked = self.state, time.perf_counter(), time.process_time()
        packs: list[Pack] = []
        wanted = stream.stage_at(state.tokens).batch
        while sum(len(pack.ids) for pack in packs) < wanted:
            packs.append(self.queue.get(timeout=600))
        total, count = self.team.learn(packs)
        torch.nn.utils.clip_grad_norm_(self.team.learner.parameters, 1.0)
        torch.set_num_threads(self.plan.threads)  # the helpers wait meanwhile
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(self.plan, state, self.first) * group.get("scale", 1.0)
            optimizer.step()
        self.average.add(self.model, state.step)
        torch.set_num_threads(1)
        state.step += 1
        state.packs += len(packs)
        state.tokens += sum(len(pack.ids) for pack in packs)
        state.targets += round(count)
        state.hours += min(time.perf_counter() - began, time.process_time() - worked) / 3600  # not while others had the cores
        return total / count

    def wait(self) -> None:
        """Sleeps while the pause file is there."""
        pause = self.plan.pause_file
        if pause is not None and pause.exists():
            self.say(f"paused: {pause} exists")
            while pause.exists() and not self.stopped:
                time.sleep(1)

    def save(self) -> None:
        checkpoints.save(self.checkpoint, self.model, self.optimizers, self.average, asdict(self.state))

    def evaluate(self) -> None:
        self.average.swap(self.model)
        for cell, scores in evaluate.quick(self.model, self.encoder).items():
            self.log.evaluation(self.state, cell, scores)
            self.say(f"  {evaluate.line(cell, scores)}")
        same = evaluate.agreement(self.model, self.encoder, self.tokenizer.eos_token_id)
        self.say(f"  decoding agrees with scoring: {same.right} of {same.n}")
        self.average.swap(self.model)
        self.log.plot()

    def run(self, each: Callable[[State, float, float], None]) -> None:
        """To the end of the budget, or until asked to stop; always leaves a checkpoint and an exported model."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "stopped", True))
        saved, scored = time.monotonic(), self.state.hours
        mean = math.nan
        while not self.done:
            self.wait()
            value = self.step()
            mean = value if math.isnan(mean) else 0.97 * mean + 0.03 * value
            self.log.loss(self.state, rate_at(self.plan, self.state, self.first), value)
            each(self.state, value, mean)
            if time.monotonic() - saved > 60 * self.plan.save_minutes:
                self.save()
                saved = time.monotonic()
            if self.state.hours - scored > self.plan.evaluate_minutes / 60:
                self.evaluate()
                scored = self.state.hours
        self.save()
        if not self.stopped:
            self.evaluate()
        share = {"last": 0.0} if self.stopped else {}  # the running mean, where the rate has not fallen yet
        checkpoints.export_checkpoint(self.checkpoint, self.plan.out / "model", self.tokenizer, **share)
