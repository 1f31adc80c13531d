"""The Context of the workflow whose step asks: its state, and the session of the engine that belongs to it. Knows no engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from llama_index.core.workflow import Context, WorkflowRuntimeError

KEY = "agentcache_session"  # in the state of an agent's Context, which `Context.to_dict` carries to other processes


def state() -> Any:
    """The store of the Context in whose step this runs; None outside of one."""
    if not hasattr(Context, "get_step_context"):
        return None
    try:
        return Context.get_step_context().store
    except WorkflowRuntimeError:  # no workflow asks
        return None


async def with_session(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of an agent's request, with the session of its Context unless they, or the model's settings, name one."""
    store = state()
    if store is None or "session" in given or "session" in settings or await store.get("memory", default=None) is None:
        return given
    if not (known := await store.get(KEY, default="")):
        known = uuid.uuid4().hex
        try:
            await store.set(KEY, known)
        except RuntimeError:  # the step is just editing its state: the next request names the session
            return given
    agent = await store.get("current_agent_name", default="")
    return {**given, "session": f"{known}/{agent}" if agent else known}
