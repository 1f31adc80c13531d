"""Checkpoints that also see, loaded by their folder: the text of them is reused, and images are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentcache.bench import families
from agentcache.errors import MessageError
from agentcache.model.verdict import verdict
from tests import models
from tests.asking import SYSTEM, TOOLS, Asking, user
from tests.families import stock_logits

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
# model type of the checkpoint -> the family of its text, settings of that, and what makes its vision tiny
SEES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}, TINY),
    "gemma4": ("gemma4_text", {"pad_token_id": 0, "hidden_size_per_layer_input": 16}, {**TINY, "num_key_value_heads": 2, "head_dim": 16}),
    "kimi_k25": ("deepseek_v3", {}, {**TINY, "num_heads": 2}),
    "llava_onevision": ("qwen2", {}, TINY),
    "llama4": ("llama4_text", {}, {**TINY, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 64}),
    "mistral3": ("ministral3", {}, TINY),
    "qwen3_5": (
        "qwen3_5_text",
        {},
        {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14},
    ),
}

AS_A_WHOLE = ("gemma3", "gemma4", "kimi_k25", "llava_onevision", "mistral3")  # of the others transformers loads the language model alone


pytestmark = pytest.mark.usefixtures("one_thread")


def saved(name: str, folder: Path) -> Any:
    """A tiny model of images and text, saved with a tokenizer."""
    family, settings, vision = SEES[name]
    outer = CONFIG_MAPPING[name]
    seen = type(outer().vision_config or CONFIG_MAPPING[f"{name}_vision"]())(**vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = outer(text_config=families.config_of(family, **settings).to_dict(), vision_config=seen.to_dict())
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    models.toy_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", SEES)
def test_the_text_of_models_that_also_see_is_reused(name: str, asking: Callable[..., Asking], tmp_path: Path) -> None:
    whole, family = saved(name, tmp_path), families.TINY[SEES[name][0]]
    first = asking(tmp_path, tmp_path / "store")
    held = first.engine.model
    assert (held.support.paged, held.bitwise, held.stepped) == (True, family.bits, False), held.support.why
    assert held.spec is not None
    assert held.spec.recurrent is family.recurrent
    assert verdict(held).get("images", "loaded without its vision").startswith("refused" if name in AS_A_WHOLE else "loaded")
    group = first.engine.warm(SYSTEM["content"], TOOLS, name="group")
    messages = [SYSTEM, user("How high is the tide?")]
    said, found = first(messages)
    off, expected = first(messages, reuse="off")
    first.engine.flush()
    again, from_disk = asking(tmp_path, tmp_path / "store")(messages)
    for hit, logits in ((said, found), (again, from_disk)):
        assert hit.receipt.cached_tokens >= group.prefix_tokens
        assert hit.ids == off.ids
        assert torch.equal(logits, expected) or not family.bits
    alone = whole.language_model if name == "llama4" else whole  # which asks it for images in each forward: transformers 5.24
    own = stock_logits(alone, first.engine.renderer.render(messages, TOOLS).ids)[-1]  # of the very weights that were saved
    torch.testing.assert_close(expected[0], own, rtol=0, atol=1e-3 * float(own.abs().max()))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(MessageError, match=r"messages\[1\]: content part .*image_url.* is not text"):
        first.engine.generate([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}], TOOLS)
