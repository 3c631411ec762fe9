"""A service with agents of the OpenAI Agents SDK (pip install openai-agents): python sdk_agent.py PORT.

Each POST has a task, and the address and the key of the task's model. The reply is the reward.
"""

import asyncio
import json
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

NAMES = ("rain", "wind", "tide", "news")


def reading(tool: str, day: int) -> str:
    """Returns what a tool says on a day. The news say nothing of the weather."""
    return str(zlib.crc32(f"{tool} {day}".encode()) % 10) if tool in NAMES[:3] else ""


def tool(name: str, day: int) -> FunctionTool:
    """Returns a tool of the SDK."""

    async def call(_context: Any, _arguments: str) -> str:
        return reading(name, day)

    schema = {"type": "object", "properties": {}}
    return FunctionTool(name, f"Returns the {name}.", schema, call, strict_json_schema=False)


async def run(task: dict[str, Any], environment: dict[str, str]) -> float:
    """Returns whether the tool that the model called gave the answer."""
    address, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
    async with AsyncOpenAI(base_url=address, api_key=key) as client:
        agent = Agent(
            name="forecaster",
            model=OpenAIChatCompletionsModel("gpt-5", client),
            tools=[tool(name, task["day"]) for name in NAMES],
            tool_use_behavior="stop_on_first_tool",
        )
        try:
            result = await Runner.run(agent, task["prompt"], max_turns=1)
        except (MaxTurnsExceeded, ModelBehaviorError):  # no tool, or one that does not exist
            return 0.0
    return float(result.final_output == task["answer"])


class Episodes(BaseHTTPRequestHandler):
    """Runs an episode for each POST."""

    def do_POST(self) -> None:
        """Replies with the reward."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps(asyncio.run(run(body["task"], body["environment"]))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class Server(ThreadingHTTPServer):
    """A server at which many episodes may begin at a time."""

    request_queue_size = 512


if __name__ == "__main__":
    set_tracing_disabled(True)
    Server(("127.0.0.1", int(sys.argv[1])), Episodes).serve_forever()
