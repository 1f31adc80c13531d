"""Retrieved nodes in the order in which they are cached, and nodes computed at index time: the engine orders and learns them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode, TransformComponent

from agentcache import PASSAGES, Message

from .base import AgentCacheLLM
from .translate import to_messages

KEY = "agentcache"  # in a node's metadata: the digest under which it is learnt


def _prompt(llm: AgentCacheLLM, template: BasePromptTemplate, **given: Any) -> list[Message]:
    """The messages that a response synthesizer sends, with PASSAGES in the place of the nodes."""
    asked = template.format_messages(llm=llm, **{"context_str": PASSAGES, "query_str": "", **given})
    return to_messages(llm._extend_messages(asked), llm.late_system)


class CacheAwareOrder(BaseNodePostprocessor):
    """Puts nodes into the order in which most of their text is cached; the last postprocessor of a query or chat engine.

    Equal nodes become one, no other is dropped. Where the order changes, one more node at the end says how the retriever ranked them.
    """

    llm: AgentCacheLLM = Field(description="The model that answers.")
    prompt: BasePromptTemplate = Field(default=DEFAULT_TEXT_QA_PROMPT_SEL, description="The template with {context_str}.")
    ranks: bool = Field(default=True, description="Say in the prompt how the nodes were ranked.")

    @classmethod
    def class_name(cls) -> str:
        return "CacheAwareOrder"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        if len(nodes) < 2:
            return nodes
        texts = [node.node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes]
        prompt = _prompt(self.llm, self.prompt, query_str=query_bundle.query_str if query_bundle else "")
        found = self.llm.engine.arrange(texts, prompt, namespace=self.llm.namespace, adapter=self.llm.additional_kwargs.get("adapter"))
        shown = [nodes[number] for number in found.order]
        if self.ranks and found.ranks:
            shown.append(NodeWithScore(node=TextNode(text=found.ranks), score=0.0))
        return shown


class LearnNodes(TransformComponent):
    """Computes nodes at index time; the last transformation of an ingestion pipeline. A changed node takes the place of the old one."""

    llm: AgentCacheLLM = Field(description="The model that will answer.")
    prompt: BasePromptTemplate = Field(default=DEFAULT_TEXT_QA_PROMPT_SEL, description="The template with {context_str}.")
    separator: str = Field(default="\n\n", description="What the response synthesizer writes between two nodes.")
    name: str = Field(default="documents", description="The name under which the engine lists and forgets them.")

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        texts = {node.node_id: node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes}
        learnt = self.llm.engine.learn(
            {source: text for source, text in texts.items() if text},
            messages=_prompt(self.llm, self.prompt),
            separator=self.separator,
            name=self.name,
            namespace=self.llm.namespace,
            adapter=self.llm.additional_kwargs.get("adapter"),
        )
        digests = {one.source: one.digest for one in learnt.documents}
        for node in nodes:
            if node.node_id in digests:
                node.metadata[KEY] = digests[node.node_id]
                for excluded in (node.excluded_llm_metadata_keys, node.excluded_embed_metadata_keys):
                    if KEY not in excluded:
                        excluded.append(KEY)
        return nodes

    def __getstate__(self) -> dict[str, Any]:
        pickle.dumps(self.llm)  # LlamaIndex would leave it out, and a pipeline's workers learn without one
        return super().__getstate__()

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same on a thread: learning takes as long as it computes."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def release(self, node_ids: Sequence[str]) -> int:
        """Release nodes that were deleted from the index; returns how many were learnt."""
        return self.llm.engine.unlearn(node_ids, name=self.name, namespace=self.llm.namespace)
