"""`with_structured_output`: from a schema to a bound model and a parser. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from operator import itemgetter
from typing import Any, get_origin

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputKeyToolsParser, JsonOutputParser, PydanticOutputParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel
from typing_extensions import is_typeddict

from ._tools import UNDESCRIBABLE, formatted, reason
from .errors import ModelInvalidRequestError, OutputCutError

METHODS = ("function_calling", "json_schema", "json_mode")
_FUNCTIONS = {"function", "parameters", "input_schema", "toolSpec"}  # keys of function schemas, of one provider or another
_NAMES = {"name", "title", "description", "strict"}


def structured(
    model: BaseChatModel, schema: Any, method: str, include_raw: bool, kwargs: Mapping[str, Any]
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """The model held to the schema, and what reads its answer."""
    if unknown := sorted(name for name, value in kwargs.items() if value is not None):
        raise ModelInvalidRequestError(
            f"with_structured_output: unknown arguments {unknown!r}; set the model to what its completions are to be, "
            "and bind_tools(tools, response_format={...}) has tools beside a form"
        )
    if method not in METHODS:
        raise ModelInvalidRequestError(f"method={method!r}: must be one of {METHODS!r}")
    if schema is None and method != "json_mode":
        raise ModelInvalidRequestError(f"schema=None: method={method!r} needs a schema; only 'json_mode' does without")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method != "json_mode" or schema is not None:
        _check(schema)
    form: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": _whole(schema)}}
    said = {"kwargs": {"method": method}, "schema": _for_tracers(schema, form)} if schema is not None else None
    parser: Any
    if method == "function_calling":
        name = _function_name(schema)
        bound = model.bind_tools([schema], tool_choice=name, parallel_tool_calls=False, ls_structured_output_format=said)
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    else:
        bound = model.bind(response_format=form, show_schema=False, ls_structured_output_format=said)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    parser = RunnableGenerator(_whole_only, _awhole_only) | parser
    if not include_raw:
        return bound | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | read.with_fallbacks([failed], exception_key="parsing_error")


def _whole_only(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """The same messages, or OutputCutError where parsers would take half an object for one."""
    for message in messages:
        _refuse_cut(message)
        yield message


async def _awhole_only(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        _refuse_cut(message)
        yield message


def _refuse_cut(message: AIMessage) -> None:
    said = message.response_metadata
    if said.get("agentcache", {}).get("cut"):
        tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else 0
        there = "".join(str(call["args"]) for call in message.invalid_tool_calls) or str(message.text)
        raise OutputCutError(said.get("finish_reason"), tokens, there)


def _whole(schema: Any) -> dict[str, Any]:
    """The JSON schema of a form. What is one already is taken as it is: LangChain's way through a function keeps objects only."""
    if isinstance(schema, Mapping):
        inner = schema["json_schema"] if schema.get("type") == "json_schema" and "json_schema" in schema else schema
        if isinstance(inner, Mapping) and isinstance(wrapped := inner.get("schema"), Mapping):
            return dict(wrapped)
        if not _FUNCTIONS & schema.keys():
            return dict(schema)
    try:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            return schema.model_json_schema()
        return convert_to_json_schema(schema)
    except UNDESCRIBABLE as error:
        raise ModelInvalidRequestError(
            f"schema={schema!r:.200}: cannot be written as a JSON schema ({reason(error)}); pass a pydantic class, or a JSON schema"
        ) from error


def _function_name(schema: Any) -> str:
    """What the function is called that a form becomes; refuses a form of which it would hold the name only."""
    function = formatted([schema])[0]["function"]
    if isinstance(schema, Mapping) and "parameters" not in function and schema.keys() - _NAMES and "function" not in schema:
        raise ModelInvalidRequestError(
            f"schema={schema!r:.200}: has no properties at its top, and cannot be the arguments of a function; use method='json_schema'"
        )
    return str(function["name"])


def _for_tracers(schema: Any, form: Mapping[str, Any]) -> Any:
    """The form as LangChain's tracing can read it: a JSON schema as the parameters of a function, or it would be lost there."""
    if isinstance(schema, Mapping) and "json_schema" in form:
        return {"name": str(schema.get("title") or schema.get("name") or "answer"), "parameters": form["json_schema"]["schema"]}
    return schema


def _check(schema: Any) -> None:
    """Refuse what would be read as a function of no arguments, or fail without saying whose fault it is."""
    is_form = isinstance(schema, Mapping) or callable(schema) and get_origin(schema) is None
    if isinstance(schema, type):
        is_form = is_basemodel_subclass(schema) or is_typeddict(schema) or bool(getattr(schema, "__annotations__", None))
    if not is_form:
        raise ModelInvalidRequestError(f"schema={schema!r:.200}: must be a pydantic class, a TypedDict, a JSON schema or a function schema")
