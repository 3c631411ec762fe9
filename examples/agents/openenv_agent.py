"""An agent in an OpenEnv environment with tools: a coroutine function with OpenEnv's client and OpenAI's.

The tools and the rewards are those of the environment's server, whose address is in the task: {"prompt": "...",
"server": "http://localhost:8000", "seed": 3}. Needs pip install openenv openai.
"""

import json
from typing import Any

from openai import AsyncOpenAI
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

TURNS = 8


def described(tool: Any) -> dict[str, Any]:
    """Returns a tool of an environment as OpenAI's API has it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def result_text(observation: Any) -> str:
    """Returns what the model reads of a tool's result."""
    if observation.error is not None:
        return f"error: {observation.error.message}"
    result = observation.result
    return str(result["data"] if isinstance(result, dict) and "data" in result else result)


async def run(task: dict[str, Any], client: Any) -> float:
    """Returns the sum of the environment's rewards, until it or the model ends the episode."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    reward = 0.0
    async with AsyncOpenAI(**client.openai) as model, MCPToolClient(base_url=task["server"]) as environment:
        await environment.reset(seed=task["seed"])
        tools: Any = [described(tool) for tool in await environment.list_tools()]
        for _ in range(TURNS):
            reply = (await model.chat.completions.create(model="gpt-5", messages=messages, tools=tools)).choices[0]
            messages.append(reply.message.model_dump(exclude_none=True))
            for call in reply.message.tool_calls or []:
                action = CallToolAction(tool_name=call.function.name, arguments=json.loads(call.function.arguments))
                step = await environment.step(action)
                reward += step.reward or 0.0
                text = result_text(step.observation)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if step.done:
                    return reward
            if not reply.message.tool_calls:
                break
    return reward
