"""A game of several turns: the policy finds a number by asking a tool, and then says it."""

from typing import Literal

from millrace.environments import Environment, Message, Row, Step, tool


class Guess(Environment):
    """The row's ground truth is the number. An episode earns 1 for the number, less a little for each question."""

    def __init__(self, highest: int = 100, question_costs: float = 0.05) -> None:
        self.highest, self.question_costs = highest, question_costs
        self.number, self.questions = 0, 0

    async def reset(self, row: Row) -> list[Message]:
        self.number = int(row["ground_truth"])
        text = f"I think of a number from 1 to {self.highest}. Find it with `compare`, then say it, and nothing else."
        return [{"role": "user", "content": text}]

    @tool
    def compare(self, guess: int) -> Literal["higher", "lower", "equal"]:
        """Says whether the number is higher or lower than a guess.

        Args:
            guess: A number that it may be.
        """
        if not 1 <= guess <= self.highest:
            raise ValueError(f"the number lies between 1 and {self.highest}")
        self.questions += 1
        return "equal" if guess == self.number else "higher" if guess < self.number else "lower"

    async def step(self, message: Message) -> Step:
        said = message["content"].strip()
        if not said.isdigit():
            return "Say the number in digits, and nothing else.", 0.0, False
        return [], float(int(said) == self.number), True

    async def score(self) -> float:
        return -self.question_costs * self.questions
