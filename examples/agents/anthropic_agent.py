"""An agent with Anthropic's client, and four tools: a coroutine function, of which many run in one process.

`client.anthropic` has the address and the key for the client. The value that it returns is its reward.
"""

import zlib
from typing import Any

from anthropic import AsyncAnthropic

NAMES = ("rain", "wind", "tide", "news")
TOOLS: Any = [
    {"name": name, "description": f"Returns the {name}.", "input_schema": {"type": "object", "properties": {}}}
    for name in NAMES
]


def reading(tool: str, day: int) -> str:
    """Returns what a tool says on a day. The news say nothing of the weather."""
    return str(zlib.crc32(f"{tool} {day}".encode()) % 10) if tool in NAMES[:3] else ""


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Returns whether the tool that the model called gave the answer, and how many it called."""
    question: Any = [{"role": "user", "content": task["prompt"]}]
    async with AsyncAnthropic(**client.anthropic) as model:
        reply = await model.messages.create(model="claude", max_tokens=30, messages=question, tools=TOOLS)
    readings = [reading(block.name, task["day"]) for block in reply.content if block.type == "tool_use"]
    return {"reward": float(readings == [task["answer"]]), "tool_calls": float(len(readings))}
