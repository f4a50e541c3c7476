"""An agent written with the package openai: it finds a number with a tool. It knows nothing of training.

rollout:
  agent: {command: [python, /path/to/guess_openai.py], renderer: qwen3}
reward: {function: exact}
"""

import json
import os
from typing import Any

from openai import OpenAI

QUESTIONS = 8
COMPARE: Any = {
    "type": "function",
    "function": {
        "name": "compare",
        "description": "Says whether the number is higher or lower than a guess.",
        "parameters": {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]},
    },
}


def compare(number: int, arguments: str) -> str:
    """The result of the tool."""
    try:
        guess = int(json.loads(arguments)["guess"])
    except (ValueError, KeyError, TypeError):
        return "Error: give a guess, in digits."
    return "equal" if guess == number else "higher" if guess < number else "lower"


def main() -> None:
    row = json.loads(os.environ["MILLRACE_PROMPT"])
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY lead to the policy
    messages: Any = list(row["prompt"])
    for _ in range(QUESTIONS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[COMPARE])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            told = compare(int(row["ground_truth"]), call.function.arguments) if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


if __name__ == "__main__":
    main()
