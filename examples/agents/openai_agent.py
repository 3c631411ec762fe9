"""An agent with OpenAI's client, and four tools: python openai_agent.py task.json. It knows nothing of who trains it.

The client reads OPENAI_BASE_URL and OPENAI_API_KEY, and the last line that it prints is its reward.
"""

import json
import sys
import zlib
from typing import Any

from openai import OpenAI

NAMES = ("rain", "wind", "tide", "news")
PARAMETERS = {"type": "object", "properties": {}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"Returns the {name}.", "parameters": PARAMETERS}}
    for name in NAMES
]


def reading(tool: str, day: int) -> str:
    """Returns what a tool says on a day. The news say nothing of the weather."""
    return str(zlib.crc32(f"{tool} {day}".encode()) % 10) if tool in NAMES[:3] else ""


def readings(question: str, day: int) -> list[str]:
    """Returns what the tools say that the model calls."""
    messages: Any = [{"role": "user", "content": question}]
    reply = OpenAI().chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS).choices[0].message
    return [reading(call.function.name, day) for call in reply.tool_calls or [] if call.type == "function"]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        task = json.load(file)
    print(json.dumps({"reward": float(readings(task["prompt"], task["day"]) == [task["answer"]])}))
