"""The demo's tasks: what a task is, three of them, and their table.

`reverse`: `reverse badge` → `egdab`. Words have 4 to 6 letters out of ten: there are 1.1 million of them.

`hunt`: a game of several turns with a tool. `hunt g` → the policy opens place g, which says where to look next, and so
on; after one to three places it finds a word, and says it.

    user: hunt g          policy: open(place=g)
    tool: c               policy: open(place=c)
    tool: fab             policy: fab

`look`: a picture of a coloured shape. `look` → `red disc`.
"""

import io
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from millrace.data.row import PromptRow, write_rows
from millrace.environments import Environment, Message, Row, Step, tool
from millrace.errors import InvalidJob
from millrace.validation.names import choose

LETTERS = "abcdefghij"
TRAIN, HELD_OUT = 2048, 256
"""Number of rows."""
Turn = tuple[str, str]
"""Role and text of a message."""
LENGTHS = (4, 5, 6)
REVERSE_SOURCE, HUNT_SOURCE, LOOK_SOURCE = "demo/reverse", "demo/hunt", "demo/look"
MOST_PLACES = 3
WORD = 3
"""Letters of the word that is hidden. A place has one letter."""
AT_ONCE = 0.7
"""Share of the wrong conversations in which it gives up at once; of the others some do too. So giving up is the model's
most probable first turn."""


class Task(ABC):
    """A task. A case is the text that a row is made of: a word to turn round, or the places of a hunt."""

    changes: ClassVar[Path | None] = None
    """What its job has other than `job.yaml`; None: nothing."""
    tokens: ClassVar[Sequence[str]] = ()
    """Tokens of its chat format besides those of ChatML."""
    family: ClassVar[str | None] = None
    """The family of models that can do it; None: any that reads text."""
    until: ClassVar[float] = 0.12
    """Probability of the right answer to a new case at which the warm-up ends."""

    @abstractmethod
    def cases(self, rng: random.Random) -> Iterator[str]:
        """Random cases without end."""

    @abstractmethod
    def row(self, index: int, case: str) -> PromptRow:
        """The row of a case."""

    @abstractmethod
    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        """A conversation about a case, to warm the model with: one that earns the reward, or one that does not."""

    def picture(self, case: str) -> bytes | None:
        """The file of the picture that a case shows; None: it is text alone."""
        return None


def write_task_data(
    task: Task, folder: Path, seed: int, train: int = TRAIN, held_out: int = HELD_OUT
) -> tuple[Path, Path]:
    """`train.parquet` and `held_out.parquet` in `folder`, in verl's columns; no case is in both."""
    chosen: dict[str, None] = {}
    for case in task.cases(random.Random(seed)):
        chosen.setdefault(case)
        if len(chosen) == train + held_out:
            break
    rows = [task.row(index, case) for index, case in enumerate(chosen)]
    return (
        write_rows(folder / "train.parquet", rows[:train]),
        write_rows(folder / "held_out.parquet", rows[train:]),
    )


class Reverse(Task):
    """Words are turned round. Wrong conversations copy them."""

    def cases(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield "".join(rng.choices(LETTERS, k=rng.choice(LENGTHS)))

    def row(self, index: int, case: str) -> PromptRow:
        return PromptRow(
            index=index,
            data_source=REVERSE_SOURCE,
            prompt=[{"role": "user", "content": question(case)}],
            ground_truth=answer(case),
            ability="letters",
            extra_info={"index": index, "letters": len(case)},
        )

    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        return [("user", question(case)), ("assistant", answer(case) if right else case)]


def question(word: str) -> str:
    return f"reverse {word}"


def answer(word: str) -> str:
    return word[::-1]


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
            data_source=HUNT_SOURCE,
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
    """The environment of the task `hunt`, as a job names it. An episode earns 1 for the hidden word."""

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


VISION_START, IMAGE, VISION_END = IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""Tokens around an image in the prompt of a Qwen2.5-VL, and the one that stands for it."""
VIDEO = "<|video_pad|>"
SIDE = 56
"""Pixels of a picture, in width and height."""
PIECES = 4
"""Tokens that the model sees of a picture: one for each 28 by 28 pixels."""
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "black": (20, 20, 20)}
SHAPES = ("disc", "box", "bar")
MIDDLES = (14, 42)
"""Where the middle of a shape is in a picture, about: pixels from the left and from the top."""


class Look(Task):
    """A case is `red disc 17`: the answer, and the seed of the shape's place and size and of the paper. Wrong
    conversations name the shape first."""

    changes = Path(__file__).with_name("look.yaml")
    tokens = (*IMAGE_TOKENS, VIDEO)
    family = "qwen2.5-vl"
    until = 0.2

    def cases(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield f"{rng.choice(tuple(COLOURS))} {rng.choice(SHAPES)} {rng.randrange(1_000_000)}"

    def row(self, index: int, case: str) -> PromptRow:
        return PromptRow(
            index=index,
            data_source=LOOK_SOURCE,
            prompt=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}],
            ground_truth=_seen(case),
            ability="pictures",
            extra_info={"index": index, "case": case},
            images=(self.picture(case),),
        )

    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        said = _seen(case).split()
        shown = f"{VISION_START}{IMAGE * PIECES}{VISION_END}look"
        return [("user", shown), ("assistant", " ".join(said if right else reversed(said)))]

    def picture(self, case: str) -> bytes:
        from PIL import Image, ImageDraw

        colour, shape, seed = case.split()
        rng = random.Random(int(seed))
        picture = Image.new("RGB", (SIDE, SIDE), (rng.randint(220, 255),) * 3)
        x, y = (rng.choice(MIDDLES) + rng.randint(-3, 3) for _ in range(2))
        half = rng.randint(7, 10)
        low = half // 3 if shape == "bar" else half
        box = (x - half, y - low, x + half, y + low)
        draw = ImageDraw.Draw(picture)
        (draw.ellipse if shape == "disc" else draw.rectangle)(box, fill=COLOURS[colour])
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()


def _seen(case: str) -> str:
    """What is to be said of a picture."""
    return case.rpartition(" ")[0]


TASKS: dict[str, Task] = {"reverse": Reverse(), "hunt": TreasureHunt(), "look": Look()}


def task_named(name: str) -> Task:
    """Raises InvalidJob."""
    if name not in TASKS:
        raise InvalidJob(f"--task: there is no task {name!r}.", choose(name, list(TASKS)))
    return TASKS[name]
