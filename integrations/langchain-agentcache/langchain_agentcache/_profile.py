"""What LangChain's model profile asks about a model, in LangChain's words. Loads no weights and downloads nothing."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import ModelProfile

from agentcache import ModelFacts


def profile_of(model: str, facts: ModelFacts, context: int | None) -> ModelProfile:
    """The profile; what cannot be known without downloading something is left out, not guessed."""
    limit = min((each for each in (context, facts.context_tokens) if each), default=None)
    told = {
        **dict.fromkeys(("max_input_tokens", "max_output_tokens"), limit),
        "reasoning_output": facts.reasoning,
        "tool_calling": facts.tool_calling,
        "mid_conversation_system_messages": facts.later_system,
    }
    known: dict[str, Any] = {
        "name": model,
        "open_weights": True,
        **dict.fromkeys(("text_inputs", "text_outputs", "temperature"), True),
        **dict.fromkeys(("image_inputs", "audio_inputs", "pdf_inputs", "video_inputs", "mid_conversation_tools"), False),
        **dict.fromkeys(("tool_calling", "tool_choice", "tool_call_streaming", "structured_output"), True),
        **{name: value for name, value in told.items() if value is not None},
    }
    return cast("ModelProfile", known)
