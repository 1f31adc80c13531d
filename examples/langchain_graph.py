"""A LangGraph conversation that goes on in another process, and is still warm there: state in a checkpoint, keys and values on disk.

    python examples/langchain_graph.py MODEL FOLDER "My name is Ada. Is the light burning?"
    python examples/langchain_graph.py MODEL FOLDER "What is my name?"

MODEL is a Hugging Face id or a folder of a chat model; FOLDER keeps the conversation and what was computed for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from langchain_agentcache import ChatAgentCache
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SYSTEM = SystemMessage(
    "You are the keeper of a lighthouse. You know wind, tide and every ship that passes, and you answer in one sentence. "
    "You look at the lamp before you say whether it burns, and you never invent a ship."
)


@tool
def lamp() -> str:
    """Whether the lamp burns."""
    return "The lamp burns."


def main(model: str, folder: str, question: str) -> None:
    bound = ChatAgentCache(model=model, max_tokens=48, cache_dir=str(Path(folder) / "pages")).bind_tools([lamp])

    def keeper(state: MessagesState) -> MessagesState:
        return {"messages": [bound.invoke([SYSTEM, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("keeper", keeper)
    graph.add_node("tools", ToolNode([lamp]))
    graph.add_edge(START, "keeper")
    graph.add_conditional_edges("keeper", tools_condition)
    graph.add_edge("tools", "keeper")
    Path(folder).mkdir(parents=True, exist_ok=True)
    with SqliteSaver.from_conn_string(str(Path(folder) / "conversation.sqlite")) as saver:
        app = graph.compile(checkpointer=saver)
        state = app.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "keeper"}})
    asked = max(at for at, message in enumerate(state["messages"]) if message.type == "human")
    receipt = state["messages"][asked + 1].response_metadata["agentcache"]  # of the first step: later ones find pages in memory
    print(state["messages"][-1].text)
    read = f"{receipt['cached_tokens']} tokens cached, {receipt['disk_tokens']} of them read from disk"
    print(f"{len(state['messages'])} messages, {read}; the thread's session: {receipt['resumed'] or 'new'}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
