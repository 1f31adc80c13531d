"""lint with a byte-level BPE that is trained here, on this repository: token boundaries, prompts whose start changed, speed."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import pytest

from agentcache.layout.tokenise import EMPTY, Encoder
from agentcache.lint import Cause, Options, lint
from agentcache.lint.retokenise import LEAST, resumed
from agentcache.lint.show import page
from agentcache.lint.templated import Loaded
from tests import chat_templates
from tests.checkout import ROOT
from tests.lint.requests import TOOLS


@cache
def words() -> tuple[str, ...]:
    return tuple(word for path in sorted(ROOT.glob("agentcache/*.py")) for word in path.read_text(encoding="utf-8").split())


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=4_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(words()[at : at + 200]) for at in range(0, len(words()), 200)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def text(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(words(), k=count))


def test_a_prompt_that_ends_inside_a_token() -> None:
    rules = "You keep the ledger of a small harbour.\nQuestion: is there room?\n"
    loaded = Loaded(tokenizer(), None)
    (found,) = lint(
        [{"prompt": f"{rules}Thought: "}, {"prompt": f"{rules}Thought: return the first berth."}], Options(tokenizer=loaded)
    ).findings
    assert (found.cause, found.writer) == (Cause.BOUNDARY, "tokenizer boundary")
    assert "other tokens" in found.detail
    assert "white space" in found.fix
    ids = [tokenizer()(f"{rules}Thought: {more}", add_special_tokens=False)["input_ids"] for more in ("", "return")]
    assert found.token == len(ids[0]) - 1 == next(at for at, (one, other) in enumerate(zip(*ids)) if one != other)
    assert found.cost_tokens <= 1
    clean = [{"prompt": f"{rules}Thought:"}, {"prompt": f"{rules}Thought: return the first berth."}]
    assert lint(clean, Options(tokenizer=loaded)).findings == []


class Counting(Encoder):
    """How many characters were tokenised."""

    spent = 0

    def _encode(self, given: str) -> Any:
        self.spent += len(given)
        return super()._encode(given)


@pytest.mark.parametrize("seed", range(6))
def test_text_after_a_change_keeps_its_ids(seed: int) -> None:
    rng = random.Random(seed)
    encoder = Counting(tokenizer())
    body, tail = text(rng, 1_500), "<|im_end|>\n<|im_start|>assistant\n"
    first = rng.randrange(len(body) // 2)
    places = [first, first, rng.randrange(len(body))]
    known = EMPTY
    for step, place in enumerate(places):
        said = f"It is 09:{step + 10}:{rng.randrange(60)}. {'ab ' * rng.randrange(9)}"
        more = text(rng, 40) if step else ""
        now = body[:place] + said + body[place:] + ("<|im_end|>\n" + more if more else "") + tail
        encoder.spent = 0
        known = resumed(encoder, known, now)
        assert (known.ids, known.ends) == Encoder(tokenizer()).encode(now)
        assert known.text == now
        if step == 1:
            assert len(body) - place > LEAST
            assert encoder.spent < len(now) / 2


def test_a_tail_that_only_looks_alike_is_tokenised_whole() -> None:
    rng = random.Random(5)
    encoder = Encoder(tokenizer())
    body = text(rng, 900)
    was, now = f"a {body} {body[:400]} end" + "x" * 80, f"b {body[: len(body) // 2]} {body[:400]} end" + "x" * 80
    known = resumed(encoder, resumed(encoder, EMPTY, was), now)
    assert (known.ids, known.ends) == encoder.encode(now)


def log(requests: int, chars: int, clock: bool) -> list[dict[str, Any]]:
    """Conversations of forty requests, each of about so many characters at its end."""
    out: list[dict[str, Any]] = []
    rng = random.Random(0)
    system = text(rng, 300)
    while len(out) < requests:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text(rng, chars // 8)[: chars - 4_000]}]
        for step in range(min(40, requests - len(out))):
            said = f"It is 09:{step:02d}:17.\n{system}" if clock else system
            shown = [{"role": "system", "content": said}, *messages[1:]]
            out.append(json.loads(json.dumps({"conversation_id": str(len(out) // 40), "messages": shown, "tools": TOOLS})))
            messages += [{"role": "assistant", "content": text(rng, 6)}, {"role": "user", "content": text(rng, 6)}]
    return out


def test_a_report_names_a_unit_that_is_no_token() -> None:
    prompts = [{"prompt": "Where is the tide?"}]
    assert " prompt tokens\n" in page(lint(prompts, Options(tokenizer=Loaded(tokenizer(), None))))
    assert " prompt tokens (" in page(lint(prompts))


@pytest.mark.parametrize("clock", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_hundred_requests_of_eight_thousand_tokens(tokens: bool, clock: bool) -> None:
    """In processor time: beside tokenising each of them whole, and where nothing is tokenised beside reading them as JSON."""
    tokenises = tokenizer()
    loaded = Loaded(tokenises, chat_templates.CHATML) if tokens else None
    bodies = log(100, 28_000, clock)
    lint(bodies[:2], Options(tokenizer=loaded))  # what is compiled and probed once
    began = time.process_time()
    found = lint(bodies, Options(tokenizer=loaded))
    between = time.process_time()
    for body in bodies:
        if tokens:
            chat = tokenises.apply_chat_template(body["messages"], tools=body["tools"], tokenize=False, chat_template=chat_templates.CHATML)
            tokenises(chat)
        else:
            json.loads(json.dumps(body))
    plain = time.process_time() - between
    totals = found.totals()
    assert totals["prompt_tokens"] / 100 > 6_500
    assert len(found.findings) == (97 if clock else 0)
    assert between - began < (0.7 if tokens else 16) * plain
