"""The tools, forms and questions of most tests. Holds no tests."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field


@tool
def tide(harbour: str, day: int = 0) -> str:
    """When is high water?"""
    return f"High water in {harbour} at {3 + day}."


@tool
def log(text: str) -> str:
    """Write into the log."""
    return "written"


class Ship(BaseModel):
    """A ship that passed."""

    name: str = Field(max_length=12)
    flags: int = Field(ge=0, le=9)


SYSTEM = SystemMessage("You are the keeper of a lighthouse. Write down wind, tide and every ship that passes.")
ASKED = [SYSTEM, HumanMessage("When is high water in Port Averil?")]
