"""The conversation of a run: LangGraph's thread, and who asks in it. Knows no engine and no messages."""

from __future__ import annotations

from langchain_core.runnables.config import ensure_config


def place() -> tuple[str, str, str]:
    """The agent that runs now, its place in the graph, and the thread; each empty where there is none."""
    config = ensure_config()
    said, about = config.get("configurable") or {}, config.get("metadata") or {}
    nodes = [part.partition(":")[0] for part in str(said.get("checkpoint_ns") or "").split("|")]  # after the ":", the run
    return str(about.get("lc_agent_name") or ""), "|".join(nodes), str(said.get("thread_id") or "")


def task() -> str:
    """LangGraph's name for this run of this node; empty where there is none."""
    return str((ensure_config().get("configurable") or {}).get("checkpoint_ns") or "")


def session() -> str | None:
    """The name of the session that a request goes on: of its thread, agent and node; None without a thread."""
    agent, nodes, thread = place()
    return "/".join(part for part in (thread, agent, *nodes.split("|")) if part) if thread else None
