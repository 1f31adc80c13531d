"""What the embedded model's training is made of: first weights that copy, stages, the averaged weights, checkpoints that resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from agentcache import embedded
from examples.embedded import checkpoints, evaluate, initial, stream, trainer
from examples.embedded import model as models
from examples.embedded import tokenizer as tokenizers
from examples.embedded.packing import Encoder, pack, samples_of
from examples.embedded.world import world
from examples.embedded.world.dialogues import bundle


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.train(vocab=700, count=12)


def test_the_first_weights_copy_what_followed_before() -> None:
    torch.manual_seed(0)
    keys, values = torch.randint(10, 2000, (12, 2)), torch.randint(10, 2000, (12, 2))
    entries = torch.cat((keys, torch.full((12, 1), 5), values, torch.full((12, 1), 6)), 1)  # k k : v v ,
    again = torch.randperm(12)
    ids = torch.cat((entries.flatten(), entries[again].flatten()))[None]
    asked = (72 + 6 * torch.arange(12)[:, None] + torch.tensor([[2, 3]])).flatten()  # behind ":", and behind the first v
    model = models.build(2000, mlp=64)
    with torch.inference_mode():
        before = model(ids).logits[0, asked].argmax(-1)
        initial.structure(model, 0)
        after = model(ids).logits[0, asked].argmax(-1)
    right = values[again].flatten()
    assert (before == right).sum() <= 3
    assert (after == right).float().mean() > 0.8


def test_stages_grow_to_every_style(tokenizer: Any) -> None:
    stages = stream.STAGES
    assert [stage.until for stage in stages] == sorted(stage.until for stage in stages)
    assert all(later.tools >= 0.8 * stage.tools for stage, later in zip(stages, stages[1:], strict=False))
    assert stages[-1].tools == 50
    assert stream.stage_at(0) is stages[0]
    assert stream.stage_at(10**12) is stages[-1]
    assert stages[-1].tools == 50
    assert set(stages[-1].styles) == set(stream.STYLES)
    packs = stream.packs(tokenizer, 0)
    kinds = {completion.kind for _ in range(4) for completion in next(packs).completions}
    assert {"call", "answer"} <= kinds


def test_the_last_stage_says_every_part_of_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that were never to be said were not copied: a tool with one in its name went wrong in one answer of four."""
    tokenizer = tokenizers.load(embedded.folder())
    encoder = Encoder(tokenizer)
    monkeypatch.setattr(stream, "draw", functools.cache(stream.draw))  # what one counts, the other counts too
    counted = stream.counted
    monkeypatch.setattr(stream, "counted", lambda encoder, seed, packs: counted(encoder, seed, min(packs, 150)))
    pieces = tuple(stream.unsaid(encoder, 0))
    assert {encoder.parts[token] for token in stream.unread(encoder, 0)} <= set(pieces)
    alone = {part: ids for ids, part in encoder.parts.items() if tokenizer(part)["input_ids"] == [ids]}
    rare = {alone[part] for part in pieces if part in alone and part not in world.KNOWN}
    said: dict[bool, set[int]] = {}
    for wanted in (False, True):
        packs = [stream.draw(encoder, 1, number, 10**9, pieces if wanted else ()) for number in range(40)]
        said[wanted] = rare & {token for made in packs for token in made.ids[made.targets()].tolist()}
    assert len(said[True] - said[False]) > 2 * len(said[False] - said[True])


def test_small_catalogs_come_with_shorter_tails(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int, int]] = []
    monkeypatch.setattr(stream, "pack", lambda _, made, limit, short: drawn.append((made.style, len(made.tools), limit)))
    encoder, last = Encoder(tokenizer), stream.STAGES[-1]
    for number in range(120):
        stream.draw(encoder, 0, number, 10**9)
    short = [(style, tools) for style, tools, limit in drawn if limit == last.tail // 2]
    assert 0.3 * last.small < len(short) / 120 < 0.8 * last.small  # in Hermes' style, one half
    assert {style for style, _ in short} == {"hermes"}
    assert sum(tools <= stream.FEW for _, tools in short) > 0.8 * len(short)  # those of a scenario may be one or two more


def test_the_average_follows_the_weights_and_swaps_back(tokenizer: Any) -> None:
    model = models.build(64, layers=1, hidden=64, mlp=64)
    average = models.Average(model)
    name, weight = next(iter(model.named_parameters()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    average.add(model, step=1)  # keeps 2 of 11
    assert torch.allclose(average.values[name], before + 9 / 11)
    mean, last = average.values[name].clone(), weight.detach().clone()
    average.swap(model)
    assert torch.equal(weight, mean)
    assert torch.equal(average.values[name], last)
    average.swap(model)
    assert torch.equal(weight, last)


@pytest.mark.parametrize("muon", [True, False])
def test_a_resumed_run_steps_as_if_it_had_never_stopped(tmp_path: Path, muon: bool) -> None:
    def step(model: Any, using: models.Optimizers, average: models.Average, number: int) -> None:
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for one in using:
            one.step()
        average.add(model, number)

    def fresh(seed: int) -> tuple[Any, models.Optimizers, models.Average]:
        model = models.build(64, layers=1, hidden=64, mlp=64, seed=seed)
        return model, models.optimizers(model, 1e-2, muon), models.Average(model)

    whole = fresh(0)
    for number in range(2):
        step(*whole, number)
    checkpoints.save(tmp_path / "checkpoint.safetensors", *whole, {"step": 2})
    again = fresh(1)
    assert checkpoints.restore(tmp_path / "checkpoint.safetensors", *again) == ({"step": 2}, False)
    for run in (whole, again):
        step(*run, 2)
    for (name, one), (_, other) in zip(whole[0].named_parameters(), again[0].named_parameters()):
        assert torch.equal(one, other), name
        assert torch.equal(whole[2].values[name], again[2].values[name]), name


@pytest.mark.parametrize("muon", [True, False])
def test_wider_heads_leave_the_model_nearly_the_same(tmp_path: Path, muon: bool) -> None:
    def fresh(head_dim: int, seed: int) -> tuple[Any, models.Optimizers, models.Average]:
        model = models.build(64, layers=2, hidden=64, mlp=64, heads=4, kv_heads=2, head_dim=head_dim, seed=seed)
        return model, models.optimizers(model, 1e-2, muon), models.Average(model)

    narrow, using, average = fresh(16, 0)
    with torch.no_grad():
        for number, (name, value) in enumerate(narrow.named_parameters()):
            value.mul_(3.0 if "proj" in name else 1.0)  # attention that looks at something
            value.grad = torch.full_like(value, 1e-3)
            average.values[name].mul_(1 + 0.01 * number)
    for one in using:
        one.step()
    checkpoints.save(tmp_path / "checkpoint.safetensors", narrow, using, average, {"step": 7})
    wide = fresh(32, 1)
    assert checkpoints.restore(tmp_path / "checkpoint.safetensors", *wide) == ({"step": 7}, True)

    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    for swapped in (False, True):
        with torch.inference_mode():
            one, other = narrow(ids).logits, wide[0](ids).logits
        assert (one - other).norm() < 0.1 * one.norm()
        average.swap(narrow)
        wide[2].swap(wide[0])
        assert swapped or (one - narrow(ids).logits).norm() > 0.1 * one.norm()

    kept = {name for name, value in wide[0].named_parameters() if any(value in one.state for one in wide[1])}
    assert kept == {name for name, _ in narrow.named_parameters() if ".self_attn." not in name}
    for value in wide[0].parameters():
        value.grad = torch.ones_like(value)
    for one in wide[1]:
        one.step()
    with pytest.raises(ValueError, match="head_dim=48"):
        checkpoints.wider(dict(narrow.named_parameters()), 48)


def test_a_new_layer_starts_silent_and_learns(tokenizer: Any, tmp_path: Path) -> None:
    def fresh(layers: int, seed: int) -> Any:
        return models.build(len(tokenizer), layers=layers, hidden=64, mlp=64, heads=4, kv_heads=2, seed=seed)

    five = fresh(5, 0)
    checkpoints.export(tmp_path / "five", five, tokenizer)
    (tmp_path / "five" / checkpoints.STATE).write_text('{"step": 7}', "utf-8")
    seven = fresh(7, 1)
    average = models.Average(seven)
    assert checkpoints.begin_from(tmp_path / "five", seven, average) == {"step": 7}
    checkpoints.begin_from(tmp_path / "five", five, models.Average(five))  # as it was written: rounded
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(five(ids).logits, seven(ids).logits)
    assert all(torch.equal(average.values[name], value) for name, value in seven.named_parameters())
    layers = seven.model.layers
    says = [bool(layer.mlp.down_proj.weight.any()) for layer in layers]
    assert says == [True, True, True, True, False, False, True]
    assert torch.equal(layers[4].self_attn.q_proj.weight, layers[3].self_attn.q_proj.weight)
    seven(ids).logits.square().sum().backward()
    assert all(layers[number].self_attn.o_proj.weight.grad.any() for number in (4, 5))
    four = fresh(4, 2)
    with pytest.raises(ValueError, match="layers=4: the model in .* has 5; give 5"):
        checkpoints.begin_from(tmp_path / "five", four, models.Average(four))


@pytest.mark.parametrize("half", [True, False])
def test_factors_are_rounded_where_the_processor_is_faster_at_it(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    monkeypatch.setattr(trainer, "HALF", half)
    try:
        trainer.round_factors()
        assert (products.fp32_precision == "bf16") is half
    finally:
        products.fp32_precision = before


def test_exported_weights_lie_between_mean_and_last(tokenizer: Any, tmp_path: Path) -> None:
    model = models.build(len(tokenizer), layers=1, hidden=64, mlp=64)
    average = models.Average(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    checkpoints.save(tmp_path / "checkpoint.safetensors", model, [], average, {"step": 3})
    for last, moved in ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0)):
        state = checkpoints.export_checkpoint(tmp_path / "checkpoint.safetensors", tmp_path / str(last), tokenizer, last)
        assert state == {"step": 3}
        with safe_open(tmp_path / str(last) / "model.safetensors", "pt") as file:
            for name in average.values:
                assert torch.equal(file.get_tensor(name), (average.values[name] + moved).bfloat16()), name


def test_unread_tokens_get_distinct_embeddings(tokenizer: Any) -> None:
    model = models.build(len(tokenizer), layers=1, hidden=64, mlp=64)
    weight, unread = model.get_input_embeddings().weight, [300, 401, 402, 403]
    with torch.no_grad():
        weight[unread] = weight.mean(0) + 1e-3 * weight[unread]
    average = models.Average(model)
    before = weight.detach().clone()
    checkpoints.renew(model, average, unread)
    kept = [token for token in range(len(weight)) if token not in unread]
    assert torch.equal(weight[kept], before[kept])
    assert torch.equal(average.values["model.embed_tokens.weight"][unread], weight[unread])
    apart, usual = torch.pdist(weight[unread]), torch.pdist(weight[kept])
    assert torch.pdist(before[unread]).max() < 0.1 * usual.median()
    assert apart.min() > 0.5 * usual.median()


def test_an_update_of_muon_has_even_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((24, 64), (64, 24)):
        values = torch.linalg.svdvals(models.orthogonal(torch.randn(shape) @ torch.diag(torch.logspace(0, 1, shape[1]))))
        assert values.min() > 0.5
        assert values.max() < 1.4


@pytest.mark.parametrize("style", stream.STYLES)
def test_a_pack_learns_what_its_samples_learn_alone(tokenizer: Any, style: str) -> None:
    one = bundle("gradients", style, 3, 3)
    made = pack(Encoder(tokenizer), one, 1_000_000)
    model = models.build(len(tokenizer), layers=2, hidden=64, mlp=64)
    model.set_attn_implementation(models.NAME)
    value, _ = models.loss(model, made)
    value.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    known: set[int] = set()
    total = torch.zeros(())
    completions = iter(made.completions)
    for sample in samples_of(one):
        ids, spans = Encoder(tokenizer).sample(sample)
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        for place in spans:
            rows = next(completions).rows.tolist()
            fresh = [place.first + n for n, row in enumerate(rows) if row not in known]  # a row that samples share counts once
            known.update(rows)
            places = torch.tensor(fresh, dtype=torch.long)
            total = total + torch.nn.functional.cross_entropy(logits[places - 1], torch.from_numpy(ids)[places], reduction="sum")
    assert torch.allclose(value, total, rtol=1e-4)
    total.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-3 * float(parameter.grad.abs().max())), name


def test_attention_in_bf16_is_nearly_that_in_fp32(tokenizer: Any) -> None:
    torch.manual_seed(0)
    made = pack(Encoder(tokenizer), bundle("halves", "hermes", 5, 5), 1_000_000)
    assert len(made.branches) > 2
    rows = len(made.ids)
    states = [torch.randn(*shape, rows, 8) for shape in ((2, 2), (2,), (2,))]
    change, found = torch.randn(2, 2, rows, 8), []
    for half in (False, True):
        given = [one.clone().requires_grad_() for one in states]
        out = models.Attention.apply(*given, models.blocks(made), half)
        out.backward(change)
        found.append([out.detach(), *(one.grad for one in given)])
        assert all(one.dtype == torch.float32 for one in found[-1])
    for exact, rounded in zip(*found):
        assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.01


def test_decoding_gives_the_verdict_of_scoring(tokenizer: Any) -> None:
    model = models.build(len(tokenizer), layers=2, hidden=64, mlp=64)
    model.set_attn_implementation(models.NAME)
    same = evaluate.agreement(model, Encoder(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>"), 2)
    assert (same.right, same.n) == (2, 2)
