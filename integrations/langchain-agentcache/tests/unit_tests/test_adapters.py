"""`adapter=`: of a model, of one call, of a tool group; the same engine answers for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harbour import ASKED
from langchain_agentcache import AgentCacheLLM, CacheAwareOrder, ChatAgentCache, LearnDocuments
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agentcache.errors import ConfigError

PROMPT = ChatPromptTemplate.from_messages([("system", "{context}"), ("user", "{input}")])


@pytest.fixture
def judge(model_folder: str, tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_a_model_and_a_call_name_their_adapter(form: Any, model_folder: str, judge: str) -> None:
    made = {"model": model_folder, "adapters": {"judge": judge}, "max_tokens": 8, "cache_dir": ""}
    with form(**made) as base, form(**made, adapter="judge") as other:
        texts = [
            getattr(answer, "text", answer) for answer in (base.invoke(ASKED), other.invoke(ASKED), base.invoke(ASKED, adapter="judge"))
        ]
        assert texts[0] != texts[1] == texts[2]
        assert base.load()._engine() is other.load()._engine()
        if form is ChatAgentCache:
            assert other.warm("A keeper of the harbour.", name="keeper").adapter == base._engine().adapters["judge"]
        with pytest.raises(ConfigError, match="adapter='critic': there is none of that name"):
            base.invoke(ASKED, adapter="critic")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_documents_are_learnt_and_ordered_for_its_adapter(model_folder: str, judge: str) -> None:
    made = {"model": model_folder, "adapters": {"judge": judge}, "adapter": "judge", "max_tokens": 2, "cache_dir": ""}
    documents = [Document(page_content=f"Note {number}: {'the quay is wet. ' * 12}") for number in range(3)]
    with ChatAgentCache(**made) as model:
        learn = LearnDocuments(model, PROMPT)
        learn.transform_documents(documents)
        shown = CacheAwareOrder(model, PROMPT, ranks=False).transform_documents(documents[::-1])
        assert shown == documents
        texts = "\n\n".join(document.page_content for document in documents)
        usage = model.invoke(PROMPT.invoke({"context": texts, "input": "?"})).usage_metadata
        assert usage["input_token_details"]["cache_read"] > 0.8 * usage["input_tokens"]
