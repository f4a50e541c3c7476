"""What `millrace validate` finds beyond the fields: in every row, in prompts as tokens, in the reward and the model."""

import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from millrace.admission import thorough
from millrace.admission.trials import RewardTrial, ask_judges, model_mistakes
from millrace.data.row import PromptRow, write_rows
from millrace.errors import InvalidJob
from millrace.spec import parse
from tests.models import CHATML, byte_tokenizer

pytestmark = pytest.mark.slow


def spec_of(folder: Path, file: str, reward: dict[str, Any] | None = None, **data: Any) -> Any:
    tree = {"name": "sums", "output": str(folder / "out"), "model": {"path": str(folder)}}
    tree |= {"data": {"files": [str(folder / file)], **data}, "reward": reward or {"function": "exact"}}
    return parse(tree)


def rows(count: int, truth: Callable[[int], Any] = str) -> list[PromptRow]:
    asked = [[{"role": "user", "content": f"{n} + 0 ="}] for n in range(count)]
    return [PromptRow(n, "sums", prompt, ground_truth=truth(n)) for n, prompt in enumerate(asked)]  # type: ignore[arg-type]


def plain(things: Iterable[Any], what: str, count: int) -> Iterable[Any]:
    return things


def read(spec: Any) -> thorough.Section:
    (section,) = thorough._sections(spec)
    return thorough._read(spec, section, plain)


BAD = [
    {"data_source": "sums", "reward_model": {"ground_truth": "1"}},
    {"data_source": "sums", "prompt": "1", "reward_model": {}},
    {"data_source": 3, "prompt": "1", "reward_model": {"ground_truth": "1"}},
    {"data_source": "sums", "prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}},
    {"data_source": "sums", "prompt": "1 \ud83d", "reward_model": {"ground_truth": "1"}},
    {"data_source": "sums", "prompt": "1", "reward_model": {"ground_truth": "1", "style": 4}},
    [],
]


@pytest.mark.parametrize("packed", [False, True])
def test_every_row_of_json_lines_is_read_and_named_by_number_and_line(packed: bool, tmp_path: Path) -> None:
    good = {"data_source": "sums", "prompt": "1", "reward_model": {"ground_truth": "1"}}
    text = "\n\n".join(map(json.dumps, [good, *BAD, good])).encode()
    name = "train.jsonl.gz" if packed else "train.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    found = read(spec_of(tmp_path, name))
    assert (found.rows, found.unusable, len(found.sample)) == (9, 7, 2)
    told = [str(mistake) for mistake in found.mistakes]
    assert len(told) == 5 and all(line.startswith("data.files: row ") and "Fix: " in line for line in told)
    assert "row 1: " in told[0] and f"{name} line 3, column prompt: is missing" in told[0]
    assert "row 5: " in told[4] and "holds half a character" in told[4]


def test_every_row_of_a_parquet_file_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.data.parquet.ROWS_AT_ONCE", 7)
    several = rows(30)
    object.__setattr__(several[17], "prompt", [])
    write_rows(tmp_path / "train.parquet", several)
    found = read(spec_of(tmp_path, "train.parquet"))
    assert (found.rows, found.unusable) == (30, 1)
    assert "row 17: " in str(found.mistakes[0]) and "column prompt" in str(found.mistakes[0])
    assert [row.index for row in found.sample] == [n for n in range(30) if n != 17]


def test_the_sample_of_many_rows_is_spread_over_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thorough, "SAMPLE", 10)
    write_rows(tmp_path / "train.jsonl", rows(100))
    assert [row.index for row in read(spec_of(tmp_path, "train.jsonl")).sample] == list(range(0, 100, 10))


def test_prompts_that_would_be_dropped_are_counted(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 259}))
    several = [PromptRow(n, "sums", "x" * n, ground_truth="1") for n in range(1, 11)]
    write_rows(tmp_path / "train.jsonl", several)

    def told(**data: Any) -> tuple[list[str], list[str]]:
        spec, notes = spec_of(tmp_path, "train.jsonl", **data), []
        mistakes = thorough._prompts(spec, [read(spec)], plain, notes)
        return [str(mistake) for mistake in mistakes], notes

    mistakes, notes = told(max_prompt_tokens=8)
    assert mistakes == [] and "10 looked at, the longest has 10 tokens; 2 (20.0%) are longer" in notes[0]
    assert "(8) and would be dropped" in notes[0]
    assert "would be cut" in told(max_prompt_tokens=8, overlong_prompts="truncate_left")[1][0]
    (tmp_path / "train.jsonl").unlink()
    write_rows(tmp_path / "train.jsonl", several[5:])
    (mistake,), _ = told(max_prompt_tokens=4)
    assert mistake.startswith("data.max_prompt_tokens: 4: every prompt of data would be dropped: the shortest has 6")


@pytest.mark.parametrize("overlong", ["drop", "truncate_left"])
def test_of_huge_prompts_only_the_beginning_is_counted(
    overlong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 259}))
    write_rows(tmp_path / "train.jsonl", [PromptRow(0, "sums", "x" * 4_000_000, ground_truth="1")])
    spec, notes, encoded = spec_of(tmp_path, "train.jsonl", overlong_prompts=overlong), list[str](), list[int]()
    tokenizer = thorough._tokenizer(spec)
    encode = tokenizer.encode

    def counting(text: str, **options: bool) -> list[int]:
        encoded.append(len(text))
        return list(encode(text, **options))

    monkeypatch.setattr(tokenizer, "encode", counting)
    monkeypatch.setattr(thorough, "_tokenizer", lambda _: tokenizer)
    found = [*map(str, thorough._prompts(spec, [read(spec)], plain, notes)), *notes]
    assert "more than 65536 tokens" in found[0]
    assert ("the shortest has" in found[0]) is (overlong == "drop")
    assert sum(encoded) < 2_000_000


def test_what_takes_long_is_told_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "train.jsonl", [PromptRow(1, "sums", "1 + 1", ground_truth="2")])
    lines: list[str] = []

    def begun(*_: Any) -> list[Any]:
        assert lines[-1] == "prompts: loading the tokenizer and making tokens of them takes some seconds"
        raise KeyboardInterrupt

    monkeypatch.setattr(thorough, "_prompts", begun)
    with pytest.raises(KeyboardInterrupt):
        lines.extend(thorough.look(spec_of(tmp_path, "train.jsonl"), plain))


def trial(folder: Path, function: str, tried: list[PromptRow], **reward: Any) -> tuple[RewardTrial, list[str]]:
    spec = spec_of(folder, "x.jsonl", {"function": function, **reward})
    made = RewardTrial(spec, spec.reward.terms(procedural=False), "data", tried)
    return made, [str(mistake) for mistake in made.mistakes()]


def test_ground_truths_that_a_built_in_reward_cannot_read_are_named(tmp_path: Path) -> None:
    made, told = trial(tmp_path, "math", rows(12, lambda n: "" if n > 4 else str(n)))
    assert len(told) == 6 and made.scored == 5 and made.score == 1.0
    assert told[0].startswith("data.files: row 5: the reward math cannot use it: it raised ValueError: the ground")
    assert "Fix: correct the row's reward_model.ground_truth" in told[0]
    assert told[5].startswith("data.files: 2 more rows fail like these.")


FUNCTION = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    "
FAILING = {
    "import nothing_here\n" + FUNCTION + "return 1": "No module named 'nothing_here'",
    "1 / 0\n" + FUNCTION + "return 1": "ZeroDivisionError",
    FUNCTION + "return extra_info['nope']": "row 0, with its ground truth as the answer, it failed: raised KeyError",
    FUNCTION + "return 'well'": "it failed: returned 'well', not a number",
    FUNCTION + "import time; time.sleep(600)": "timeout after 1 s",
    FUNCTION + "import os; os._exit(3)": "exited with status 3",
}


@pytest.mark.parametrize(("source", "words"), FAILING.items())
def test_a_function_that_fails_is_told_without_running_here(source: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    _, told = trial(tmp_path, f"{tmp_path}/mine.py:f", rows(1), timeout_s=1)
    assert len(told) == 1 and told[0].startswith("reward.function: ") and words in told[0] and "Fix: " in told[0]


def test_parts_that_a_function_does_not_return_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION + "return {'score': 1, 'length': 2}")
    assert trial(tmp_path, f"{tmp_path}/mine.py:f", rows(1), parts=["score", "length"])[1] == []
    _, told = trial(tmp_path, f"{tmp_path}/mine.py:f", rows(1), parts=["score", "form"])
    assert told[0].startswith('reward.parts: ["score", "form"]: for row 0 the function returned no \'form\'')


def test_a_model_that_the_backend_computes_wrong_is_told_before_a_trainer_has_it(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (mistake,) = model_mistakes(spec_of(tmp_path, "x.jsonl"))
    assert mistake.field == "model.path"
    assert "would run from one packed sequence into the next" in str(mistake)


def test_tokenizers_of_pools_are_loaded(tmp_path: Path) -> None:
    """A submission reads their files; that a teacher has other ids, and that one cannot be read, takes loading."""
    byte_tokenizer().save_pretrained(tmp_path)
    other = byte_tokenizer(None)
    other.add_tokens(["<think>"])
    for name, tokenizer in (("teacher", byte_tokenizer(None)), ("judge", byte_tokenizer(None)), ("broken", other)):
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    pools = [{"name": name, "path": str(tmp_path / name)} for name in ("teacher", "judge", "broken")]
    functions = [{"name": "fine", "judge": {"pool": "judge", "prompt": "{{answer}}"}}, {"name": "b", "pool": "broken"}]
    used = {"pools": pools, "reward": {"functions": functions}, "algorithm": {"distillation": {"pool": "teacher"}}}
    spec = parse(spec_of(tmp_path, "x.jsonl").model_dump(mode="json") | used)
    notes: list[str] = []
    mistakes = thorough._pools(spec, notes)
    assert notes == ["pool teacher: its tokenizer serves for log-probabilities"]
    assert [mistake.field for mistake in mistakes] == ["pools.1.path", "pools.2.path"]
    assert "has no chat template" in str(mistakes[0]) and "cannot be loaded" in str(mistakes[1])
    other.save_pretrained(tmp_path)
    assert "other ids than the policy's for 1 tokens" in str(thorough._pools(spec, notes)[0])


def test_an_output_with_checkpoints_of_another_job_is_told(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "step-3").mkdir(parents=True)
    write_rows(tmp_path / "x.jsonl", rows(2))
    tree = spec_of(tmp_path, "x.jsonl").model_dump(mode="json")
    spec = parse(tree | {"trainer": {"backend": "megatron"}})  # which builds no model here: that takes six seconds
    with pytest.raises(InvalidJob) as error:
        list(thorough.look(spec, plain))
    lines = thorough.look(spec, plain)
    assert "prompt from prompt" in next(lines) and "2 of 2 rows" in next(lines), "before the rest is looked at"
    told = str(error.value)
    assert "holds checkpoints of an earlier job" in told and "millrace resume" in told
    assert "model.path" in told, "a used output hides no other mistake"


def test_judges_are_asked_once_where_that_is_wanted(tmp_path: Path) -> None:
    asked = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = json.dumps({"choices": [{"message": {"content": "Score: 7" if len(asked) == 1 else "?"}}]})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            """Prints nothing."""

    write_rows(tmp_path / "train.parquet", rows(3))
    with http.server.HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "j", "scale": [0, 10], "retries": 0}
        reward = {"functions": [{"name": "quality", "judge": {**judge, "prompt": "{{prompt}} {{answer}}"}}]}
        spec, notes = spec_of(tmp_path, "train.parquet", reward), list[str]()
        assert ask_judges(spec, "data", rows(2)[1], notes) == []
        (mistake,) = ask_judges(spec, "data", rows(2)[1], notes)
        server.shutdown()
    (gone,) = ask_judges(spec, "data", rows(2)[1], notes)
    assert "the judge did not answer for 0.1 s: " in str(gone) and len(asked) == 2
    assert asked[0]["messages"] == [{"role": "user", "content": "1 + 0 = 1"}]
    assert notes == ["reward.functions.0.judge: gives 0.7 to the ground truth of row 1 of data"]
    assert str(mistake).startswith("reward.functions.0.judge: about row 1 of data the judge gave no score: ")
    reward = {"functions": [{"name": "quality", "judge": {"pool": "judge", "prompt": "{{answer}}"}}]}
    pools = [{"name": "judge", "path": "/judge"}]
    in_pool = spec.model_validate(spec.model_dump(mode="json") | {"reward": reward, "pools": pools})
    assert ask_judges(in_pool, "data", rows(2)[1], notes) == []
    assert notes[-1].startswith("reward.functions.0.judge: is not asked: ")


@pytest.mark.parametrize("rows_of_embedding", [258, 259])
def test_a_prompt_with_a_token_beyond_the_embedding_is_a_mistake(rows_of_embedding: int, tmp_path: Path) -> None:
    """The chat template's <|im_end|> has id 258."""
    write_rows(tmp_path / "train.jsonl", rows(3))
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows_of_embedding}))
    spec = spec_of(tmp_path, "train.jsonl", max_prompt_tokens=100)
    mistakes = thorough._prompts(spec, [read(spec)], plain, [])
    if rows_of_embedding == 259:
        assert mistakes == []
        return
    (mistake,) = mistakes
    assert "'<|im_end|>' with id 258; its embedding has 258 rows" in str(mistake)
    assert "resize_token_embeddings(259)" in str(mistake)
    notes: list[str] = []
    spec = spec_of(tmp_path, "train.jsonl", max_prompt_tokens=100)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert thorough._prompts(spec, [read(spec)], plain, notes) == []
    assert any("259 tokens, the model's embedding 258 rows" in note for note in notes)
