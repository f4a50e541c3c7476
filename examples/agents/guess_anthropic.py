"""The same agent written with the package anthropic.

rollout:
  agent: {command: [python, /path/to/guess_anthropic.py], renderer: qwen3}
reward: {function: exact}
"""

import json
import os
from typing import Any

from anthropic import Anthropic

QUESTIONS = 8
COMPARE: Any = {
    "name": "compare",
    "description": "Says whether the number is higher or lower than a guess.",
    "input_schema": {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]},
}


def compare(number: int, given: Any) -> str:
    """The result of the tool."""
    try:
        guess = int(given["guess"])
    except (ValueError, KeyError, TypeError):
        return "Error: give a guess, in digits."
    return "equal" if guess == number else "higher" if guess < number else "lower"


def main() -> None:
    row = json.loads(os.environ["MILLRACE_PROMPT"])
    client = Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY lead to the policy
    messages: Any = list(row["prompt"])
    for _ in range(QUESTIONS):
        reply = client.messages.create(model="policy", max_tokens=512, messages=messages, tools=[COMPARE])
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": compare(int(row["ground_truth"]), block.input),
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        if not results:
            print("".join(block.text for block in reply.content if block.type == "text"))
            return
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()
