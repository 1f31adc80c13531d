"""Several adapters on one base: each answers as PEFT does, a hit has the bits of reuse off, and none ever answers for another."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentcache import PASSAGES, Engine, Message, Reason, StoreOptions
from agentcache.cli.app import app
from agentcache.errors import ConfigError, ModelError
from agentcache.model import adapters
from tests import models
from tests.engines import Spy, chat, decode, engine, long_text
from tests.saved_adapters import ACTIVATED, INVOCATION, KINDS, answer, by_peft, generated, same, save


def agrees_with_peft(folder: Path, family: str, prompts: int) -> None:
    model, tokens = by_peft(folder, family), 6
    with engine(family, store=None) as running:
        running.add_adapter("one", folder)
        for salt in range(prompts):
            prompt = chat(long_text(3 + salt % 7, salt))
            (ids, logits), receipt = answer(running, prompt, "one", tokens=tokens)
            expected, rows = generated(model, list(running.renderer.render(prompt).ids), tokens)
            assert list(ids) == expected
            assert (logits - rows).abs().max() <= 1e-4
            assert receipt.adapter == running.adapters["one"]
        assert running.generate(prompt, sampling=decode(tokens)).ids != ids, "the adapter changes the answer"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_answers_are_those_of_peft(kind: str, family: str, tmp_path: Path) -> None:
    agrees_with_peft(save(tmp_path, family, **KINDS[kind]), family, prompts=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_answers_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    agrees_with_peft(save(tmp_path, **KINDS[kind]), "qwen3", prompts=200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("granite", torch.float32)])
def test_a_hit_has_the_bits_of_reuse_off(kind: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, family, **KINDS[kind])
    text = long_text(180)
    with engine(family, dtype, store=None) as running:
        running.add_adapter("one", tmp_path)
        for name in (None, "one", None, "one"):
            for turns in ([text], [text, "Noted.", "And now?"]):
                found, receipt = answer(running, chat(*turns), name)
                expected, off = answer(running, chat(*turns), name, "off")
                assert same(found, expected)
                assert receipt.bitwise
                assert off.computed_tokens == off.prompt_tokens
        assert receipt.computed_tokens < 8, "the last round found all but its last tokens"


def test_requests_of_several_adapters_share_a_forward(tmp_path: Path) -> None:
    names: list[str | None] = [None, "LoRA", "DoRA", "upper layers"]
    with engine(store=None) as running:
        for seed, name in enumerate(filter(None, names)):
            running.add_adapter(name, save(tmp_path / name, seed=seed, **KINDS[name]))
        prompts = [chat(long_text(60, salt)) for salt in range(8)]
        alone = [answer(running, prompt, names[at % 4], "off")[0] for at, prompt in enumerate(prompts)]
        spy, found = Spy(running), [None] * len(prompts)
        barrier = threading.Barrier(len(prompts))

        def ask(at: int) -> None:
            barrier.wait()
            found[at] = answer(running, prompts[at], names[at % 4])[0]  # type: ignore[call-overload]

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(map(len, spy.forwards)) > 1, "some ran together"
        assert all(same(one, other) for one, other in zip(found, alone, strict=True))  # type: ignore[arg-type]


def test_an_adapter_is_known_by_what_it_computes(tmp_path: Path) -> None:
    first, second = save(tmp_path / "first"), save(tmp_path / "second", seed=1)
    prompt = chat(long_text(140))
    with engine(store=None) as running:
        digest = running.add_adapter("judge", first)
        before, _ = answer(running, prompt, "judge")
        assert running.add_adapter("critic", first) == digest
        _, receipt = answer(running, prompt, "critic")
        assert receipt.computed_tokens == 1, "the same adapter under another name"
        assert running.add_adapter("judge", second) != digest
        other, receipt = answer(running, prompt, "judge")
        assert not same(before, other)
        assert receipt.cached_tokens == 0
        assert same(other, answer(running, prompt, "judge", "off")[0])
        scaled = running.add_adapter("judge", first, scale=2.0)
        assert scaled not in (digest, running.adapters["critic"])
        assert not same(before, answer(running, prompt, "judge")[0])
        assert same(before, answer(running, prompt, "critic")[0])


def test_a_switch_back_does_the_work_of_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, bound, bind = long_text(140), list[Any](), adapters._bind
    monkeypatch.setattr(adapters, "_bind", lambda low, module: bound.append(low) or bind(low, module))
    with engine(store=None) as running:
        running.add_adapter("one", save(tmp_path, use_dora=True))
        assert bound, "once, when it is added"
        for name in ("one", None, "one", None):
            answer(running, chat(text), name)
        bound.clear()
        spy, work = Spy(running), list[Any]()
        hashed = running.fingerprint.hashed_bytes if running.fingerprint else 0
        for ask in ("one", "one"):  # a switch back, and a hit
            spy.forwards.clear()
            _, receipt = answer(running, chat(text), ask)
            work.append((receipt.computed_tokens, list(spy.forwards)))
        assert work[0] == work[1]
        assert (bound, running.fingerprint and running.fingerprint.hashed_bytes) == ([], hashed)


def test_an_edit_through_data_reaches_the_gains_of_dora(tmp_path: Path) -> None:
    folder, answers = save(tmp_path, use_dora=True), list[Any]()
    for edited_first in (True, False):
        model = models.build("qwen3")
        weight = model.model.layers[1].self_attn.v_proj.weight
        with engine(model=model, store=None) as running:
            if not edited_first:
                running.add_adapter("one", folder)
                answer(running, chat("Hello."), "one")
            weight.data.mul_(torch.linspace(0.5, 2.0, weight.shape[1]))
            running.add_adapter("one", folder)
            answers.append(answer(running, chat("Hello."), "one")[0])
    assert same(*answers)


def test_removing_an_adapter_releases_its_pages(tmp_path: Path) -> None:
    save(tmp_path)
    prompt = chat(long_text(140))
    with engine(store=None) as running:
        running.add_adapter("one", tmp_path)
        running.add_adapter("two", tmp_path)
        answer(running, prompt, None)
        pages = len(running.store)
        running.warm("A keeper.", name="group", adapter="one")
        answer(running, prompt, "one")
        assert running.remove_adapter("one")
        assert len(running.store) > pages, "another name stands for it"
        assert running.remove_adapter("two")
        assert not running.remove_adapter("two")
        assert len(running.store) == pages
        assert running.groups == ()
        assert running.store.audit()["pins"] == 0
        with pytest.raises(ConfigError, match=r"adapter='one': there is none of that name, only \[\]"):
            answer(running, prompt, "one")


def test_layers_below_an_adapter_are_the_base_s(tmp_path: Path) -> None:
    save(tmp_path / "a", layers_to_transform=[1, 2])
    save(tmp_path / "b", seed=1, layers_to_transform=[2])
    prompt, more = chat(long_text(160)), chat(long_text(160), "Yes.", "Why?")
    with engine(store=None) as running:
        running.add_adapter("a", tmp_path / "a")
        running.add_adapter("b", tmp_path / "b")
        base, _ = answer(running, prompt, None)
        found, receipt = answer(running, prompt, "a")
        assert (receipt.shared_layers, receipt.cached_tokens) == (1, 0)
        parts = [(one.start, one.stop, one.name, one.adapter, one.layers) for one in receipt.attached_parts]
        assert parts == [(0, receipt.prompt_tokens - 1, "", "", 1)]
        assert receipt.resumed_tokens > 512
        assert receipt.exact_until == receipt.prompt_tokens + 3
        assert same(found, answer(running, prompt, "a", "off")[0])
        assert [r.reason for r in receipt.refusals] == [Reason.ADAPTER]
        found, receipt = answer(running, prompt, "b")
        assert (receipt.shared_layers, receipt.resumed_tokens) == (2, receipt.prompt_tokens - 1)
        assert same(found, answer(running, prompt, "b", "off")[0])
        again = answer(running, prompt, "b")[1]
        [one] = again.attached_parts
        assert (one.name, one.adapter, one.layers, one.stop) == ("b", running.adapters["b"], None, again.cached_tokens)
        for name in (None, "a", "b"):
            assert same(answer(running, more, name)[0], answer(running, more, name, "off")[0])
            assert answer(running, prompt, name)[1].computed_tokens == 1, "a switch back is a hit"
        assert same(base, answer(running, prompt, None)[0]), "pages of the base are as they were"
        pages = {id(e.page): e.page for e in running.store.tree.entries()}.values()
        assert sorted({page.shared_layers for page in pages}) == [0, 1, 2], "memory of sealed pages is shared layer by layer"
        assert running.store.bytes == sum(page.bytes for page in pages)


def test_the_base_takes_layers_that_an_adapter_computed(tmp_path: Path) -> None:
    save(tmp_path, layers_to_transform=[2])
    prompt = chat(long_text(160))
    with engine(store=None) as running:
        running.add_adapter("a", tmp_path)
        answer(running, prompt, "a")
        found, receipt = answer(running, prompt, None)
        assert (receipt.shared_layers, receipt.resumed_tokens) == (2, receipt.prompt_tokens - 1)
        assert same(found, answer(running, prompt, None, "off")[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head": ({"target_modules": ["lm_head"]}, "lm_head"),
    "saved modules": ({"modules_to_save": ["norm"]}, "which is no LoRA of a linear layer"),
    "pissa": ({"init_lora_weights": "pissa"}, "changes the base's weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, why = REFUSED[case]
    save(tmp_path, **options)
    with engine(store=None) as running:
        with pytest.raises((ConfigError, ModelError), match=why):
            running.add_adapter("one", tmp_path)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            running.add_adapter("one", tmp_path / "nothing")
        assert running.adapters == {}


def test_odd_names_scales_and_ranks_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(save(tmp_path / "one") / "adapter_model.safetensors")
    empty = {name: (tensor[:0] if "lora_A" in name else tensor[:, :0]).contiguous() for name, tensor in weights.items()}
    save_file(empty, save(tmp_path / "empty") / "adapter_model.safetensors")
    with engine(store=None) as running:
        with pytest.raises(ConfigError, match=r"name='': an adapter needs a name"):
            running.add_adapter("", tmp_path / "one")
        with pytest.raises(ConfigError, match=r"scale=inf"):
            running.add_adapter("one", tmp_path / "one", scale=float("inf"))
        with pytest.raises(ConfigError, match=r"'model\.layers\.0.*' has rank 0"):
            running.add_adapter("one", tmp_path / "empty")
        for name in ([], ["one"]):
            with pytest.raises(ConfigError, match=r"adapter=\[.*\]: must be a string"):
                running.generate(chat("?"), adapter=name)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"name=\[.*\]: must be a string"):
                running.remove_adapter(name)  # type: ignore[arg-type]
        assert running.adapters == {}
    with pytest.raises(ConfigError, match=r"adapters=\['one'\]: must be a dict"), engine(store=None, adapters=["one"]):
        pass


@pytest.mark.parametrize("disk", [True, False])
def test_texts_are_learnt_and_ordered_under_an_adapter(tmp_path: Path, disk: bool) -> None:
    texts = {str(number): long_text(48, number) for number in range(3)}

    def prompt(*shown: str) -> list[Message]:
        return [Message("user", f"{joined}\n\nWhat?") for joined in ["\n\n".join(shown)]]

    adapters = {"judge": save(tmp_path / "judge"), "activated": save(tmp_path / "activated", seed=1, **ACTIVATED)}
    with engine(store=tmp_path / "store" if disk else None, adapters=adapters) as running:
        running.learn(texts)
        assert running.arrange([*texts.values()][::-1], prompt(PASSAGES), adapter="judge").order == (0, 1, 2)
        assert (running.learn(texts, adapter="activated").known, running.learn(texts, adapter="judge").known) == (3, 0)
        order = running.arrange([*texts.values()][::-1], prompt(PASSAGES), adapter="judge").order
        assert order == running.arrange([*texts.values()][::-1], prompt(PASSAGES)).order == (2, 1, 0)
        receipt = running.generate(prompt(*texts.values()), sampling=decode(2), adapter="judge").receipt
        assert receipt.cached_tokens > 0.9 * receipt.prompt_tokens
        assert receipt.attached_parts[0].adapter == running.adapters["judge"]
        assert (len(running.documents()), running.unlearn(["0"])) == (6, 2)
        changed = running.learn({"1": "Another text."}, adapter="judge").documents
        assert sorted((one.source, one.tokens > 20) for one in running.documents()) == [("1", False), ("1", True), ("2", True), ("2", True)]
        assert [one.tokens > 20 for one in changed] == [False]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_weights_that_are_cut_are_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = save(tmp_path) / "adapter_model.safetensors"
    if name != whole.name:
        torch.save({}, tmp_path / name)
        whole.unlink()
    read = (tmp_path / name).read_bytes()
    with engine(store=None) as running:
        for size in (len(read) // 2, 0):
            (tmp_path / name).write_bytes(read[:size])
            with pytest.raises(ConfigError, match=r"cannot be loaded: \w.*Pass a folder that PEFT saved"):
                running.add_adapter("one", tmp_path)


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with engine(store=None) as running, pytest.raises(ConfigError, match=r"needs peft; pip install 'agentcache-llm\[adapters\]'"):
        running.add_adapter("one", tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, "Activated LoRA"])
def test_a_model_that_peft_wraps_is_right_or_refused(kind: str, tmp_path: Path) -> None:
    model = by_peft(save(tmp_path, **{**KINDS, "Activated LoRA": ACTIVATED}[kind]))
    if kind == "Activated LoRA":
        with pytest.raises(ModelError, match="acts from its invocation tokens on"):
            engine(model=model, store=None).__enter__()
        return
    with engine(model=model, store=None) as running:
        (ids, logits), _ = answer(running, chat("Hello"), None)
        expected, rows = generated(model, list(running.renderer.render(chat("Hello")).ids), 4)
        assert list(ids) == expected
        assert (logits - rows).abs().max() <= 1e-4
        with pytest.raises(ConfigError, match="the model holds adapters of PEFT already"):
            running.add_adapter("one", tmp_path)


def test_int8_weights_take_adapters_only_in_stepped_layers(tmp_path: Path) -> None:
    for family in ("qwen3", "granite"):
        models.build(family).save_pretrained(tmp_path / family)
        models.toy_tokenizer().save_pretrained(tmp_path / family)
        adapter = save(tmp_path / f"{family} adapter", family)
        with Engine(str(tmp_path / family), store=None, weights="int8") as running:
            if family == "granite":
                with pytest.raises(ConfigError, match="weights='int8' with an adapter need layers that are stepped; load without"):
                    running.add_adapter("one", adapter)
                continue
            running.add_adapter("one", adapter)
            found, receipt = answer(running, chat("Hello"), "one")
            assert receipt.weights == "int8"
            assert same(found, answer(running, chat("Hello"), "one", "off")[0])
            assert not same(found, answer(running, chat("Hello"), None)[0])


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with engine("qwen3", store=None) as running, pytest.raises(ModelError, match="it is of another base"):
        running.add_adapter("one", tmp_path)


def test_an_unpaged_model_answers_under_its_adapter(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    beyond: dict[str, Any] = {"max_position_embeddings": 64, "rope_parameters": rope}
    prompt = chat(long_text(8))
    for options in ({"use_dora": True}, ACTIVATED):
        save(tmp_path, "llama", **options)
        with engine(model=models.build("llama", **beyond), store=None) as running:
            running.add_adapter("one", tmp_path)
            (ids, logits), receipt = answer(running, prompt, "one", tokens=1)
            expected, rows = generated(by_peft(tmp_path, "llama", **beyond), list(running.renderer.render(prompt).ids), 1)
            assert receipt.path == "stock"
            assert list(ids) == expected
            assert (logits - rows).abs().max() <= 1e-4


def test_a_state_without_a_cache_starts_its_adapter_in_place(tmp_path: Path) -> None:
    with engine("llama", store=None) as running:
        running.add_adapter("one", save(tmp_path, "llama", **ACTIVATED))
        held, adapter = running.model, next(iter(running.model.adapters.values()))
        ids = torch.tensor(running.renderer.render(chat("Hello")).ids)
        whole, _ = held.stock(ids, None, adapter, len(ids) - 6)
        found, _ = held.stock(ids[-2:], ids[:-2], adapter, -4)  # six tokens are its own, four of them are in the state
        assert torch.allclose(found, whole, atol=1e-5)
        assert not torch.allclose(found, held.stock(ids, None)[0], atol=1e-2)


# -- Activated LoRA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_an_activated_lora_answers_as_in_peft(family: str, tmp_path: Path) -> None:
    agrees_with_peft(save(tmp_path, family, **ACTIVATED), family, prompts=3)


@pytest.mark.slow
def test_two_hundred_activated_answers_are_those_of_peft(tmp_path: Path) -> None:
    agrees_with_peft(save(tmp_path, **ACTIVATED), "qwen3", prompts=200)


@pytest.mark.parametrize("family", ["qwen3", "granite"])
@pytest.mark.parametrize("chunk_tokens", [512, 7])
def test_pages_before_the_invocation_are_the_base_s(family: str, chunk_tokens: int, tmp_path: Path) -> None:
    save(tmp_path, family, **ACTIVATED)
    start, text, said = len(ACTIVATED["alora_invocation_tokens"]), long_text(140), f"Say {INVOCATION} twice: {INVOCATION}"
    first, second = [text], [text, "Noted.", said]
    with engine(family, store=None, chunk_tokens=chunk_tokens) as running:
        running.add_adapter("acts", tmp_path)
        base, _ = answer(running, chat(*first), None)
        found, receipt = answer(running, chat(*first), "acts")
        assert receipt.computed_tokens == start, "the base's pages are its own"
        assert receipt.refusals[0].reason == Reason.ADAPTER
        assert same(found, answer(running, chat(*first), "acts", "off")[0])
        assert not same(found, base)
        assert running.probe(chat(*first), adapter="acts").computed_tokens == start
        found, receipt = answer(running, chat(*second), "acts")
        assert same(found, answer(running, chat(*second), "acts", "off")[0])
        _, receipt = answer(running, chat(*second), None)
        assert receipt.computed_tokens == start, "and the base takes what was computed for the adapter"
        assert same(base, answer(running, chat(*first), None)[0])


def test_a_template_without_the_invocation_is_refused(tmp_path: Path) -> None:
    tokenizer = models.toy_tokenizer()
    save(tmp_path, alora_invocation_tokens=tokenizer.encode("<|im_start|>judge", add_special_tokens=False))
    why = r"the chat template writes no invocation '<\|im_start\|>judge' before an answer"
    with engine(store=None) as running, pytest.raises(ConfigError, match=why):
        running.add_adapter("one", tmp_path)


def test_a_raw_prompt_is_invoked_where_it_says_so(tmp_path: Path) -> None:
    save(tmp_path, **ACTIVATED)
    prompt = f"<|im_start|>user\nHello{INVOCATION}Yes{INVOCATION}"
    with engine(store=None) as running:
        running.add_adapter("one", tmp_path)
        (ids, logits), _ = answer(running, prompt, "one")
        expected, rows = generated(by_peft(tmp_path), list(running.renderer.render(prompt).ids), 4)
        assert list(ids) == expected
        assert (logits - rows).abs().max() <= 1e-4
        with pytest.raises(ConfigError, match="this prompt does not end in"):
            answer(running, "Hello", "one")


# -- on disk ---------------------------------------------------------------------------------------------------------------


def test_groups_on_disk_name_their_adapter(tmp_path: Path) -> None:
    save(tmp_path / "a", layers_to_transform=[2])
    save(tmp_path / "b", seed=1)
    store, text = tmp_path / "store", long_text(160)
    prompt = chat("Why?", system=text)
    for again in (False, True):
        with engine(store=StoreOptions(store, refuse_slow=False)) as running:
            digests = [running.add_adapter(name, tmp_path / name) for name in "ab"]
            for name in (None, "a", "b"):
                group = running.warm(text, name="keeper", adapter=name)
                assert group.adapter == ("" if name is None else running.adapters[name])
                assert (group.computed_tokens <= 1) == again, "a later process reads it"
                found, receipt = answer(running, prompt, name)
                assert receipt.cached_tokens >= group.prefix_tokens - 1
                assert same(found, answer(running, prompt, name, "off")[0])
            assert running.flush()

    def told(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, "--store", str(store), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert sorted(group["adapter"] for group in told("ls")["groups"]) == sorted(["", *digests])
    assert [group["adapter"] for group in told("ls", "--adapter", digests[1][:6])["groups"]] == [digests[1]]
    assert told("inspect", "keeper", "--adapter", digests[0])["adapter"] == digests[0]
    file = tmp_path / "keeper.tar"
    assert told("export", "keeper", str(file), "--adapter", digests[0])["adapter"] == digests[0]
    rows = told("ls")["rows"]
    gone = told("prune", "--adapter", digests[0])
    assert (gone["groups"], gone["left_pages"]) == (["keeper"], rows - gone["pages"])
    assert sorted(group["adapter"] for group in told("ls")["groups"]) == sorted(["", digests[1]])
    assert told("import", str(file))["adapter"] == digests[0]


def test_a_running_engine_lets_go_of_a_pruned_adapter(tmp_path: Path) -> None:
    save(tmp_path / "a")
    store, prompt = tmp_path / "store", chat(long_text(160))
    with engine(store=StoreOptions(store)) as running:
        digest = running.add_adapter("a", tmp_path / "a")
        for name in (None, "a"):
            answer(running, prompt, name)
        assert running.flush()
        done = CliRunner().invoke(app, ["prune", "--adapter", digest, "--store", str(store)])
        assert done.exit_code == 0, done.output
        assert answer(running, prompt, "a")[1].cached_tokens == 0
        assert answer(running, prompt, None)[1].computed_tokens == 1
