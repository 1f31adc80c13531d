"""Objects of a pydantic class instead of text: what the model is told, at the tail, and how its JSON is read. Knows no engine.

The schema holds the model to it while it writes; the words at the end of the prompt tell it what is wanted. Both leave the start of the
prompt as it was, where the usual way puts a further tool at the front or rewrites the conversation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic.errors import PydanticUserError
from pydantic_core import from_json

from agentcache.errors import ConfigError

from .answer import length_of
from .canonical import canonical_schema
from .errors import StructuredOutputError

dispatcher = get_dispatcher(__name__)

Model = TypeVar("Model", bound=BaseModel)

INSTRUCTION = "Answer with one JSON object that fits this JSON schema, and with nothing else:\n{schema}"


def schema_of(output_cls: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a class; refuses what is no pydantic class."""
    if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)) or output_cls is BaseModel:
        raise ConfigError(f"output_cls={output_cls!r}: must be a pydantic class, one that is made from BaseModel")
    try:
        schema: dict[str, Any] = canonical_schema(output_cls.model_json_schema())
    except PydanticUserError as error:  # annotations that cannot be resolved, types that have no schema
        raise ConfigError(f"output_cls={output_cls.__name__}: has no JSON schema ({error})") from error
    return schema


def with_instruction(messages: Sequence[ChatMessage], schema: Any) -> list[ChatMessage]:
    """The conversation, asking for JSON at its end: in the user's last turn, or in a new one where the model spoke last."""
    text = INSTRUCTION.format(schema=json.dumps(schema, ensure_ascii=False))
    if not messages or messages[-1].role != MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, content=text)]
    last = messages[-1]
    asked = ChatMessage(role=last.role, blocks=[*last.blocks, TextBlock(text=f"\n{text}")], additional_kwargs=last.additional_kwargs)
    return [*messages[:-1], asked]


def read(output_cls: type[Model], response: ChatResponse) -> Model:
    """The object that a response spells; StructuredOutputError also for what was cut and would fit: 12 where 1250 was meant."""
    text, told = response.message.content or "", response.raw or {}
    if told.get("cut"):
        raise StructuredOutputError(f"{text!r:.500} is no {output_cls.__name__}: cut off after {length_of(told)} tokens; raise max_tokens")
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        why = "the schema allows what the class refuses"
        found = error.errors(include_url=False, include_input=False, include_context=False)[:3]
        raise StructuredOutputError(f"{text!r:.500} is no {output_cls.__name__} ({found!r}); {why}") from error


class Growing:
    """Objects out of a growing answer: each step's only where it adds something; the last one is of the class, or there is an error."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._class = output_cls
        self._flexible = create_flexible_model(output_cls)
        self._fields: Any = None

    def feed(self, response: ChatResponse) -> Iterator[BaseModel]:
        """The object so far, of the class once it fits; before that with whatever fields there are."""
        if response.raw is not None:
            yield read(self._class, response)
            return
        try:
            fields = from_json(response.message.content or "", allow_partial="trailing-strings")
        except ValueError:
            return
        if not isinstance(fields, dict) or not fields or fields == self._fields:
            return
        self._fields = fields
        try:
            yield self._class.model_validate(fields)
        except ValidationError:
            yield self._flexible.model_validate(fields)


class ObjectLLM(FunctionCallingLLM):
    """The part of a model that answers with objects: the structured_predict family over `chat(schema=...)`."""

    def _for_object(
        self, output_cls: type[BaseModel], prompt: PromptTemplate, llm_kwargs: Mapping[str, Any] | None, prompt_args: dict[str, Any]
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Messages and keywords that make the model write an object of the class."""
        schema = schema_of(output_cls)
        if not isinstance(prompt, BasePromptTemplate):
            raise ConfigError(f"prompt={prompt!r:.200}: must be a prompt template; of a text, PromptTemplate(text)")
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        demands = ("tool_choice", "tool_required", "allow_parallel_tool_calls")  # meant for the tool that others make of the class
        given = {name: value for name, value in (llm_kwargs or {}).items() if name not in demands}
        return with_instruction(messages, schema), {**given, "schema": schema, "tool_choice": "none"}

    def structured_predict(  # type: ignore[override]
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Model:
        """An object of `output_cls`: the model is held to its schema while it writes."""
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, given = self._for_object(output_cls, prompt, llm_kwargs, prompt_args)
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args))
        result = read(output_cls, self.chat(messages, **given))
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    async def astructured_predict(  # type: ignore[override]
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Model:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, given = self._for_object(output_cls, prompt, llm_kwargs, prompt_args)
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args))
        result = read(output_cls, await self.achat(messages, **given))
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    def _structured_stream_call(  # type: ignore[override]
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        """Growing objects; the base class tells LlamaIndex's instrumentation of each."""
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, given = self._for_object(output_cls, prompt, llm_kwargs, prompt_args)
        growing = Growing(output_cls)
        for response in self.stream_chat(messages, **given):
            yield from growing.feed(response)

    async def _structured_astream_call(  # type: ignore[override]
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, given = self._for_object(output_cls, prompt, llm_kwargs, prompt_args)
        responses = await self.astream_chat(messages, **given)

        async def objects() -> AsyncGenerator[Any, None]:
            growing = Growing(output_cls)
            async for response in responses:
                for made in growing.feed(response):
                    yield made

        return objects()
