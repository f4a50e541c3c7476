from pathlib import Path

from millrace.data import open_source
from millrace.demo.tasks import write_data
from millrace.rewards import load


def test_data_is_read_back_the_held_out_words_are_not_trained_and_answers_score(tmp_path: Path) -> None:
    train, held_out = (list(open_source([path])) for path in write_data(tmp_path, seed=3, train=200, held_out=50))
    assert (len(train), len(held_out)) == (200, 50)
    words = [row.prompt[0]["content"] for row in (*train, *held_out)]
    assert len(set(words)) == 250
    score = load("exact")
    for row in held_out:
        word = row.prompt[0]["content"].removeprefix("reverse ")
        given = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        assert score(solution_str=word[::-1], **given) == 1.0
        assert score(solution_str=word, **given) == float(word == word[::-1])


def test_the_seed_makes_the_data(tmp_path: Path) -> None:
    one, same, other = (write_data(tmp_path / name, seed, 20, 5)[0] for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert one.read_bytes() == same.read_bytes() != other.read_bytes()
