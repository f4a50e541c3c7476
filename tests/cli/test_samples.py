"""How `millrace show --samples` prints a sample."""

import pytest

from millrace.cli.show import _print_sample
from millrace.rest import SampleView, TurnView


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
