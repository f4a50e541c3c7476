"""How `millrace show --samples` prints a sample, and writes the images of prompts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from millrace.cli.show import _print_sample, save_images
from millrace.client import Client
from millrace.errors import InvalidState, NotFound
from millrace.rest import ImageView, SampleView, TurnView


def sample(turns: list[TurnView]) -> SampleView:
    return SampleView(
        step=3,
        prompt_id="0-7",
        purpose="train",
        prompt="What is 6·7?",
        answer="all of it",
        ground_truth="42",
        reward=1.0,
        reward_failure=None,
        stop_reason="end_of_turn",
        tokens=9,
        versions=[2],
        member="rollout-a",
        turns=turns,
    )


def printed(shown: SampleView, capsys: pytest.CaptureFixture[str]) -> list[str]:
    _print_sample(shown)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_an_answer_of_one_turn_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(sample([]), capsys)
    assert lines[-2:] == ["What is 6·7?", "all of it"]


def test_the_advantage_is_printed_where_the_trainer_told_it(capsys: pytest.CaptureFixture[str]) -> None:
    head = " ".join(printed(sample([]).model_copy(update={"advantage": -0.70710}), capsys)[:-2])
    assert "reward 1.000, advantage -0.707, 9 tokens" in head
    assert "advantage" not in " ".join(printed(sample([]), capsys))


def test_turns_are_printed_with_what_was_given_before_them(capsys: pytest.CaptureFixture[str]) -> None:
    rest = {"stop_reason": "end_of_turn", "versions": [2]}
    turns = [
        TurnView(given="", given_tokens=0, answer="call [bold]tool", sampled_tokens=4, reward=0.0, **rest),
        TurnView(given="<tool>42", given_tokens=2, answer="42", sampled_tokens=3, reward=0.5, **rest),
    ]
    assert printed(sample(turns), capsys)[-6:] == [
        "What is 6·7?",
        "turn 1: 0 tokens given, 4 sampled, reward 0.000, ended by end_of_turn",
        "call [bold]tool",
        "turn 2: 2 tokens given, 3 sampled, reward 0.500, ended by end_of_turn",
        "<tool>42",
        "42",
    ]


PNG = ImageView(media_type="image/png", width=56, height=28, bytes=12_345, sha256="ab" * 32)
OTHER = ImageView(media_type="", width=None, height=None, bytes=7, sha256="cd" * 32)


def test_images_are_named_after_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    shown = sample([]).model_copy(update={"images": [PNG, OTHER]})
    assert printed(shown, capsys)[-4:] == [
        "What is 6·7?",
        "image 1: PNG, 56 x 28 pixels, 12,345 bytes, sha256 abababababababab",
        "image 2: neither PNG, JPEG, WebP nor GIF, 7 bytes, sha256 cdcdcdcdcdcdcdcd",
        "all of it",
    ]


def test_each_image_is_written_once_and_a_missing_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, str]] = []

    def image(self: Client, job_id: str, prompt_id: str, number: int, sha256: str = "") -> bytes:
        asked.append((prompt_id, number, sha256))
        if number == 2:
            raise NotFound("image 2 is gone.", "bring it back.")
        return b"file"

    monkeypatch.setattr(Client, "image", image)
    shown = sample([]).model_copy(update={"images": [PNG, PNG]})
    with Client("http://127.0.0.1:1", token="none") as client:
        there, gone = save_images(client, "job-0123456789ab", [shown, shown], tmp_path / "new" / "folder")
        assert asked == [("0-7", 1, PNG.sha256), ("0-7", 2, PNG.sha256)]
        assert Path(there.path) == tmp_path / "new" / "folder" / "0-7-1.png"
        assert Path(there.path).read_bytes() == b"file"
        assert not gone.path and gone.problem == "image 2 is gone. Fix: bring it back."
        (tmp_path / "file").touch()
        with pytest.raises(InvalidState, match=r"--images: .*file"):
            save_images(client, "job-0123456789ab", [shown], tmp_path / "file")


def test_images_need_samples() -> None:
    result = CliRunner().invoke(app, ["show", "last", "--images", "folder"])
    assert result.exit_code == 1 and "--images" in result.output and "--samples 3" in result.output
