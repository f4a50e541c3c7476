"""The task `hunt`: a game of several turns with a tool. `hunt g` → the policy opens place g, which says where to look
next, and so on; after one to three places it finds a word, and says it.

    user: hunt g          policy: open(place=g)
    tool: c               policy: open(place=c)
    tool: fab             policy: fab
"""

import random
from collections.abc import Iterator
from pathlib import Path

from millrace.data.row import PromptRow
from millrace.demo.task import Task, Turn
from millrace.environments import Environment, Message, Row, Step, tool

LETTERS = "abcdefghij"
DATA_SOURCE = "demo/hunt"
MOST_PLACES = 3
WORD = 3
"""Letters of the word that is hidden. A place has one letter."""
AT_ONCE = 0.7
"""Share of the wrong conversations in which it gives up at once; of the others some do too. So giving up is the model's
most probable first turn."""


class TreasureHunt(Task):
    """A case is `gc fab`: the places in their order, and the word. In wrong conversations the policy gives up, most
    often at once, and says the place where it would have looked."""

    changes = Path(__file__).with_name("hunt.yaml")
    tokens = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def cases(self, rng: random.Random) -> Iterator[str]:
        while True:
            places = rng.sample(LETTERS, k=rng.randint(1, MOST_PLACES))
            yield f"{''.join(places)} {_word(rng)}"

    def row(self, index: int, case: str) -> PromptRow:
        places, word = case.split()
        return PromptRow(
            index=index,
            data_source=DATA_SOURCE,
            prompt=[{"role": "user", "content": f"hunt {places[0]}"}],
            ground_truth=word,
            ability="tools",
            extra_info={"index": index, "places": places},
        )

    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        places, word = case.split()
        gives_up_at = 0 if rng.random() < AT_ONCE else rng.randrange(len(places))
        opened = places if right else places[:gives_up_at]
        said = word if right else places[gives_up_at]
        turns = [("user", f"hunt {places[0]}")]
        for number, place in enumerate(opened):
            turns += [("assistant", call(place)), ("tool", found(places, word, number))]
        return [*turns, ("assistant", said)]


def call(place: str) -> str:
    """A call of the tool, in the format that the parser `glm` of the library renderers reads."""
    return f"<tool_call>open<arg_key>place</arg_key><arg_value>{place}</arg_value></tool_call>"


def found(places: str, word: str, number: int) -> str:
    """What lies at a place: the next place, or the word at the last one."""
    return places[number + 1] if number + 1 < len(places) else word


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=WORD))


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
