import io
from pathlib import Path

from PIL import Image

from millrace.data import open_source
from millrace.data.columns.layout import Reading
from millrace.demo.tasks import COLOURS, SIDE, TASKS, write_task_data
from millrace.rewards import load


def test_data_is_read_back_the_held_out_words_are_not_trained_and_answers_score(tmp_path: Path) -> None:
    train, held_out = (list(open_source([path])) for path in write_task_data(TASKS["reverse"], tmp_path, 3, 200, 50))
    assert (len(train), len(held_out)) == (200, 50)
    words = [row.prompt[0]["content"] for row in (*train, *held_out)]
    assert len(set(words)) == 250
    score = load("exact")
    for row in held_out:
        word = row.prompt[0]["content"].removeprefix("reverse ")
        given = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        assert score(solution_str=word[::-1], **given) == 1.0
        assert score(solution_str=word, **given) == float(word == word[::-1])


def test_pictures_are_in_the_data_and_differ(tmp_path: Path) -> None:
    look, reading = TASKS["look"], Reading(most_images=1)
    (train, _) = (list(open_source([path], reading=reading)) for path in write_task_data(look, tmp_path, 3, 60, 20))
    seen: dict[str, set[tuple[int, int, int]]] = {}
    for row in train:
        (file,) = row.images
        picture = Image.open(io.BytesIO(file)).convert("RGB")
        inked = {picture.getpixel((x, y)) for x in range(SIDE) for y in range(SIDE)} & set(COLOURS.values())
        seen.setdefault(row.ground_truth.split()[0], set()).update(inked)
        assert row.ground_truth not in str(row.prompt), "the answer is in the picture alone"
    assert seen == {name: {colour} for name, colour in COLOURS.items()}
    assert len({row.images for row in train}) > 50


def test_the_seed_makes_the_data(tmp_path: Path) -> None:
    one, same, other = (
        write_task_data(TASKS["reverse"], tmp_path / name, seed, 20, 5)[0]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one.read_bytes() == same.read_bytes() != other.read_bytes()
