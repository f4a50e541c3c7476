"""The environment of the task `hunt`, as a job names it."""

from millrace.demo.hunt import found
from millrace.environments import Environment, Message, Row, Step, tool


class Hunt(Environment):
    """An episode earns 1 for the hidden word."""

    async def reset(self, row: Row) -> list[Message]:
        self.word, self.places = str(row["ground_truth"]), str(row["extra_info"]["places"])
        return list(row["prompt"])

    @tool
    async def open(self, place: str) -> str:
        """Opens a place, and says what is there: the next place, or the word.

        Args:
            place: The letter of the place.
        """
        number = self.places.find(place) if len(place) == 1 else -1
        return found(self.places, self.word, number) if number >= 0 else "empty"

    async def step(self, message: Message) -> Step:
        return [], float(message["content"] == self.word), True
