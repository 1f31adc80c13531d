"""`adapter=`: of a model and of one call; the same engine answers for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import VOCAB, tokenizer, user
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.agentcache import AgentCacheLLM, CacheAwareOrder, LearnNodes
from peft import LoraConfig, get_peft_model

from agentcache import toy
from agentcache.errors import ConfigError


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_and_a_call_name_their_adapter(tmp_path: Path) -> None:
    toy.model(VOCAB, layers=1, hidden=128).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=4096, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(toy.model(VOCAB, layers=1, hidden=128), config).save_pretrained(tmp_path / "judge")
    made = {"model": str(tmp_path / "model"), "adapters": {"judge": str(tmp_path / "judge")}, "max_tokens": 8, "store": None}
    with AgentCacheLLM(**made) as base, AgentCacheLLM(**made, adapter="judge") as other:
        asked = [user("When is high water?")]
        answers = [base.chat(asked), other.chat(asked), base.chat(asked, adapter="judge")]
        texts = [answer.message.content for answer in answers]
        assert texts[0] != texts[1] == texts[2]
        assert base.engine is other.engine
        with pytest.raises(ConfigError, match="adapter='critic': there is none of that name"):
            base.chat([user("When is high water?")], adapter="critic")
        nodes = [TextNode(text=f"Note {number}: {'the quay is wet. ' * 12}") for number in range(3)]
        LearnNodes(llm=other)(nodes)
        found = [NodeWithScore(node=node) for node in nodes[::-1]]
        assert CacheAwareOrder(llm=other, ranks=False).postprocess_nodes(found) == found[::-1]
        assert CacheAwareOrder(llm=base, ranks=False).postprocess_nodes(found) == found
