"""Bad input, full memory, broken models: a typed error with the way out for whoever caused it, and an engine that goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason, Recorder, Sampling, errors
from agentcache.kv import Page
from agentcache.layout.tokenise import Encoder
from agentcache.runner import Runner
from agentcache.scheduler import Scheduler
from tests import models
from tests.engines import SYSTEM, TOOLS, Spy, chat, check_store, decode, engine, long_text, wait_until

MARK = "^"  # in no text of these tests
POISON = models.toy_tokenizer().convert_tokens_to_ids(MARK)


def test_every_error_is_in_the_tree_and_says_so() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert len(kinds) > 20
    for name, kind in kinds.items():
        assert issubclass(kind, (errors.AgentCacheError, UserWarning))
        assert name in (errors.__doc__ or "")
        assert kind.__doc__


# -- before any computation --------------------------------------------------------------------------------------------


def test_a_prompt_over_the_context_names_the_excess() -> None:
    with engine(model=models.build("qwen3", max_position_embeddings=100)) as running:
        spy = Spy(running)
        prompt = chat(long_text(60))
        tokens = len(running.renderer.render(prompt).ids)
        with pytest.raises(errors.ContextOverflowError, match=f"{tokens} tokens .*100 tokens by {tokens + 1 - 100}") as caught:
            running.generate(prompt, sampling=decode(1))
        assert (caught.value.prompt_tokens, caught.value.context_tokens, caught.value.over_tokens) == (tokens, 100, tokens - 99)
        with pytest.raises(errors.ContextOverflowError):
            running.warm(SYSTEM + long_text(60))
        assert spy.forwards == []
        short = running.generate("tide", sampling=decode(5000))
        assert short.receipt.prompt_tokens + short.receipt.completion_tokens == 100, "max_tokens is cut to the room there is"
        assert short.finish_reason == "length"


def test_a_prompt_far_too_long_is_refused_by_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    read, encode, long = list[int](), Encoder._encode, long_text(3000)
    monkeypatch.setattr(Encoder, "_encode", lambda encoder, text: (read.append(len(text)), encode(encoder, text))[1])
    with engine(model=models.build("qwen3", max_position_embeddings=100)) as running:
        for ask in (running.stream, running.pin, running.warm):
            with pytest.raises(errors.ContextOverflowError, match="exceeds the context of 100 tokens"):
                ask(chat(long) if ask == running.pin else long)
    assert 0 < max(read) < len(long) / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"chunk_tokens": -5}, "chunk_tokens=-5"),
        ({"memory_bytes": -1}, "memory_bytes=-1"),
        ({"reuse": "maybe"}, "reuse='maybe'"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "choose one"),
        ({"dtype": "float16"}, "dtype"),
        ({"store": 5}, r"store=5: must be a folder, StoreOptions\(folder, ...\), or None"),
        ({"store": ""}, "store='': must be a folder"),
        ({"store": None, "receipts": ""}, "receipts='': must name a folder"),
        ({"store": None, "receipts": 5}, "receipts=5: must name a folder"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ConfigError, match=said):
        Engine(models.build("qwen3"), models.toy_tokenizer(), **options)


@pytest.mark.parametrize("option", [{"store": 5}, {"memory_bytes": "4GB"}, {"stor": None}], ids=str)
def test_settings_are_refused_before_weights_are_loaded(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.model.open_model.load", lambda *given, **loading: pytest.fail("loaded"))
    with pytest.raises((errors.ConfigError, TypeError), match=next(iter(option))):
        Engine("embedded", **option)


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text('[[rule]]\nreuse = ["off"]\n')
    with engine(store="~/store", receipts="~/receipts", policy="~/rules.toml") as running, Recorder("~/requests.jsonl"):
        assert running.generate(chat("x")).receipt.refusals[0].reason == "POLICY"
    assert {path.name for path in tmp_path.iterdir()} == {"store", "receipts", "rules.toml", "requests.jsonl"}


def test_a_setting_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="devise"):
        Engine("embedded", devise="cpu")  # type: ignore[call-arg]


def test_requests_that_cannot_work() -> None:
    bad: list[tuple[type[Exception], Callable[[Engine], Any], str]] = [
        (errors.ConfigError, lambda e: e.generate(chat("x"), group="nobody"), "group='nobody'"),
        (errors.ConfigError, lambda e: e.generate(chat("x"), sampling=Sampling(forced=(5, 100_000))), r"forced.*100000.*\[0, 600\)"),
        (errors.ConfigError, lambda e: e.generate(chat("x"), sampling=Sampling(forced=(-1,))), "forced.*-1"),
        (errors.ConfigError, lambda e: e.generate(chat("x"), tools_order="best"), "tools_order='best'"),
        (errors.ConfigError, lambda e: e.generate(chat("x"), reuse=False), "reuse=False: must be one of .*'off'"),
        (errors.ConfigError, lambda e: e.generate(chat("x"), reuse=""), "reuse=''"),
        (errors.PromptError, lambda e: e.generate([]), "message"),
        (errors.PromptError, lambda e: e.generate(""), "empty"),
        (errors.ToolSchemaError, lambda e: e.generate(chat("x"), [{"no": "name"}]), "name"),
    ]
    with engine() as running:
        spy = Spy(running)
        for kind, use, said in bad:
            with pytest.raises(kind, match=said):
                use(running)
        assert spy.forwards == []
        assert not running.scheduler.live


# -- memory ------------------------------------------------------------------------------------------------------------


def when(monkeypatch: pytest.MonkeyPatch, running: Engine, fails: Callable[[list[Any], torch.Tensor], BaseException | None]) -> None:
    """Make forwards fail."""
    inner = running.model.forward

    def forward(ids: torch.Tensor, parts: list[Any], regimes: list[str], wanted: Any) -> torch.Tensor:
        if (error := fails(parts, ids)) is not None:
            raise error
        return inner(ids, parts, regimes, wanted)

    monkeypatch.setattr(running.model, "forward", forward)


def test_members_of_a_pack_that_does_not_fit_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        prompts = [chat(long_text(4, i)) for i in range(4)]
        expected = [running.generate(p, sampling=decode(6), reuse="off").ids for p in prompts]
        when(monkeypatch, running, lambda parts, ids: MemoryError() if len(parts) > 1 else None)
        streams = [running.stream(p, sampling=decode(6)) for p in prompts]
        assert [stream.completion.ids for stream in streams] == expected
        notes = [note for stream in streams for note in stream.receipt.notes]
        assert any("did not fit in memory" in note for note in notes)
        assert len(notes) <= 3 * len(streams), "one note, not one per token"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: not enough memory")], ids=repr)
def test_out_of_memory_is_an_error_the_engine_survives(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    with engine() as running:
        with monkeypatch.context() as patch:
            when(patch, running, lambda parts, ids: error)
            with pytest.raises(errors.OutOfMemoryError, match="no memory for .* tokens.*lower memory_bytes"):
                running.generate(chat("x"), sampling=decode(2))
        assert len(running.generate(chat("x"), sampling=decode(2)).ids) == 2
        assert not running.scheduler.live


def test_no_memory_for_a_page_fails_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        running.generate(chat("x"), sampling=decode(2))

        def full(self: Page, *args: Any, **more: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(Page, "__init__", full)
            for prompt in (chat("x"), chat("other")):  # one when it branches, one when it grows
                with pytest.raises(errors.OutOfMemoryError):
                    running.generate(prompt, sampling=decode(2))
        assert running.generate(chat("x"), sampling=decode(2)).receipt.cached_tokens > 0


# -- broken models -----------------------------------------------------------------------------------------------------


def poisoned(running: Engine, value: float = float("nan")) -> None:
    with torch.no_grad():
        running.model.model.get_input_embeddings().weight.data[POISON] = value


def text_ids(running: Engine, messages: Any) -> list[int]:
    return list(running.renderer.render(messages).ids)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", ["prompt", "decode"])
def test_nan_ends_its_request_and_caches_nothing(at: str, value: float) -> None:
    with engine() as running:
        poisoned(running, value)
        clean = running.generate(chat(long_text(60)), sampling=decode(4))
        bytes_before = running.store.bytes
        other = running.stream(chat("other"), sampling=decode(40))
        next(other)
        bad = chat(long_text(60)) if at == "decode" else chat(long_text(60) + MARK + long_text(200, 1))
        sampling = decode(8, forced=(50, POISON, 51, 52)) if at == "decode" else decode(8)
        with pytest.raises(errors.NonFiniteLogitsError, match="nothing of this request was kept"):
            running.generate(bad, sampling=sampling)
        assert len(other.completion.ids) == 40
        for entry in running.store.tree.entries():
            assert POISON not in entry.ids
            assert entry.page is not None
            assert torch.isfinite(entry.page.keys).all(), "a masked slot that is not finite poisons every reader"
            assert torch.isfinite(entry.page.values).all()
            assert entry.page._claim is None
        again = running.generate(chat(long_text(60)), sampling=decode(4))
        assert again.ids == clean.ids
        assert again.receipt.computed_tokens == 1
        assert running.store.bytes >= bytes_before
        check_store(running.store)


def test_nan_written_into_a_shared_page_is_scrubbed() -> None:
    with engine() as running:
        poisoned(running)
        first = running.generate(chat("x"), sampling=decode(4))
        turns = [*chat("x"), first.message]
        with pytest.raises(errors.NonFiniteLogitsError):
            running.generate([*turns, {"role": "user", "content": "bad " + MARK}], sampling=decode(4))
        (entry,) = running.store.tree.entries()
        assert entry.page is not None
        assert entry.page.filled == len(entry.ids)
        assert torch.isfinite(entry.page.keys).all()
        good = [*turns, {"role": "user", "content": "good"}]
        hit = running.generate(good, sampling=decode(4))
        assert hit.receipt.cached_tokens > 60
        assert hit.receipt.copied_tokens == 0, "the right to append was given back"
        assert hit.ids == running.generate(good, sampling=decode(4), reuse="off").ids


def test_nan_after_a_long_prompt_spares_sharing_requests() -> None:
    with engine(chunk_tokens=128) as running:
        poisoned(running)
        system = SYSTEM + long_text(300)
        expected = running.generate(chat("fine", system=system), sampling=decode(4), reuse="off").ids
        bad = running.stream(chat("bad" + MARK, system=system), sampling=decode(4))
        good = running.stream(chat("fine", system=system), sampling=decode(4))  # attaches what the bad one has filled
        with pytest.raises(errors.NonFiniteLogitsError):
            bad.completion  # noqa: B018
        assert good.completion.ids == expected
        assert good.receipt.cached_tokens > 512
        assert running.generate(chat("fine", system=system), sampling=decode(4)).ids == expected


class OddError(LookupError):
    pass


@pytest.mark.parametrize("error", [RuntimeError("boom"), OddError("odd"), AttributeError("x"), ZeroDivisionError("z")], ids=repr)
def test_a_model_that_raises_fails_only_whose_tokens_it_ran(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with engine() as running:
        expected = running.generate(chat("fine"), sampling=decode(30), reuse="off").ids
        when(monkeypatch, running, lambda parts, ids: error if POISON in ids else None)
        fine = running.stream(chat("fine"), sampling=decode(30))
        next(fine)
        with pytest.raises(errors.GenerationError, match=f"{type(error).__name__}: ") as caught:
            running.generate(chat("bad"), sampling=decode(9, forced=(POISON, 50)))
        assert caught.value.__cause__ is error
        assert fine.completion.ids == expected
        assert running.generate(chat("bad"), sampling=decode(3)).receipt.cached_tokens > 0
        assert not running.scheduler.live
        check_store(running.store)


def test_an_error_holds_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: weakref.WeakSet[Page] = weakref.WeakSet()
    init = Page.__init__

    def counted(self: Page, spec: Any, **more: Any) -> None:
        init(self, spec, **more)
        pages.add(self)

    with engine() as running:
        monkeypatch.setattr(Page, "__init__", counted)
        when(monkeypatch, running, lambda parts, ids: RuntimeError("boom"))
        with pytest.raises(errors.GenerationError) as caught:
            running.generate(chat("x"), sampling=decode(2))
        assert caught.value.__cause__ is not None
        assert wait_until(lambda: gc.collect() is not None and not len(pages))


def test_a_fault_outside_the_model_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        stream = running.stream(chat("x"), sampling=decode(5))
        monkeypatch.setattr(stream._request.decoding.text, "push", lambda token: 1 // 0)
        other = running.stream(chat("y"), sampling=decode(5))
        with pytest.raises(errors.GenerationError, match="ZeroDivisionError"):
            stream.completion  # noqa: B018
        assert len(other.completion.ids) == 5


def test_a_device_thread_that_dies_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unforeseen(BaseException):
        pass

    def die(self: Runner, work: Any) -> Any:
        raise Unforeseen("of the device")

    with engine() as running:
        monkeypatch.setattr(Runner, "run", die)
        monkeypatch.setattr("threading.excepthook", lambda args: None)
        for _ in range(2):
            with pytest.raises(errors.EngineClosedError, match="ended by a fault, Unforeseen: 'of the device'"):
                running.generate(chat("x"))


def test_a_fault_outside_of_requests_ends_those_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = Scheduler._compose
    faults = iter([True])
    with engine() as running:
        monkeypatch.setattr(Scheduler, "_compose", lambda self: 1 // 0 if self.live and next(faults, False) else compose(self))
        with pytest.raises(errors.GenerationError, match="ZeroDivisionError"):
            running.generate(chat("x"))
        assert running.generate(chat("x"), sampling=decode(5)).receipt.completion_tokens == 5


def test_a_fault_of_idle_work_ends_such_work_alone() -> None:
    class Faulty:
        pending, steps = True, 0

        def step(self) -> None:
            self.steps += 1
            raise ZeroDivisionError

        def counts(self) -> dict[str, dict[str, float]]:
            return {}

    work = Faulty()
    with engine() as running:
        running.scheduler.idle.append(work)
        running.generate(chat("x"), sampling=decode(1))
        assert wait_until(lambda: not running.scheduler.idle)
        assert running.generate(chat("x"), sampling=decode(5)).receipt.completion_tokens == 5
    assert work.steps == 1


# -- models that cannot be paged ---------------------------------------------------------------------------------------


def foreign_model() -> Any:
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": models.VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 512}
    return MptForCausalLM(MptConfig(**shape, bos_token_id=None, eos_token_id=None, initializer_range=0.2)).eval()


def test_a_model_that_cannot_be_paged_answers_and_says_why() -> None:
    model = foreign_model()
    with engine(model=model) as running:
        streams = [running.stream(chat("x"), TOOLS, sampling=decode(12)) for _ in range(2)]
        first, second = (stream.completion for stream in streams)
        assert first.ids == second.ids
        receipt = running.generate(chat("x"), TOOLS, sampling=decode(12)).receipt
        assert (receipt.cached_tokens, receipt.bitwise, receipt.path) == (0, False, "stock")
        (refusal,) = receipt.refusals
        assert (refusal.reason, refusal.start, refusal.stop) == (Reason.LAYER_KIND, 0, receipt.prompt_tokens)
        assert "mpt" in refusal.detail
        ids = torch.tensor([running.renderer.render(chat("x"), TOOLS).ids])
        with pytest.raises(errors.ConfigError, match="cannot be kept"):
            running.warm(SYSTEM, TOOLS)
        assert len(running.store) == 0
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert first.ids == tuple(theirs[0, ids.shape[1] :].tolist())
