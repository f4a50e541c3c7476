"""What only this machine can tell of a job: its files and folders, what backends and engines take. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.admission import submission
from millrace.data.row import PromptRow, write_rows
from millrace.errors import InvalidJob
from tests.lora.folders import RANK, write_folder
from tests.megatron.configs import QWEN3_30B_A3B


def model_folder(folder: Path, tokens: int = 259, tokenizer: bool = True) -> Path:
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": tokens}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def job(folder: Path, critic: dict[str, Any]) -> dict[str, Any]:
    rows = write_rows(folder / "train.parquet", [PromptRow(0, "sums", "1 + 1 =", ground_truth="2")])
    return {
        "name": "a job",
        "output": str(folder / "out"),
        "model": {"path": str(model_folder(folder / "policy"))},
        "data": {"files": [str(rows)]},
        "reward": {"function": "exact"},
        "algorithm": {"preset": "ppo", "critic": critic},
    }


def test_a_critic_may_have_a_folder_of_its_own_without_a_tokenizer(tmp_path: Path) -> None:
    assert submission.check(job(tmp_path, {})).algorithm.critic is not None
    folder = model_folder(tmp_path / "critic", tokenizer=False)
    (tmp_path / "second").mkdir()
    spec = submission.check(job(tmp_path / "second", {"path": str(folder)}))
    assert spec.algorithm.critic is not None and spec.algorithm.critic.path == str(folder)


def test_rows_of_trl_by_a_pattern_are_stored_with_the_files_that_match(tmp_path: Path) -> None:
    tree = job(tmp_path, {})
    files = [tmp_path / f"part-{number}.jsonl" for number in (0, 1)]
    for file in files:
        file.write_text(json.dumps({"question": "1 + 1 =", "solution": "2"}))
    tree["data"] = {"files": [f"{tmp_path}/part-*.jsonl"], "columns": {"prompt": "question"}}
    assert submission.check(tree).data.files == [str(file) for file in files]
    tree["data"]["columns"] = {"prompt": "question", "ground_truths": "solution"}
    with pytest.raises(InvalidJob, match=r"data\.columns.*ground_truth"):
        submission.check(tree)
    tree["data"]["columns"] = {"prompt": "question"}
    files[0].write_text(json.dumps({"question": "1 + 1 =", "result": "2"}))
    with pytest.raises(InvalidJob, match=r"the reward exact compares .*the first row has none.*data\.columns"):
        submission.check(tree)


def test_paths_stay_below_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alice", "alice-too", "shared"):
        (tmp_path / name).mkdir()
    tree = job(tmp_path / "alice", {})
    monkeypatch.setenv("MILLRACE_ROOTS", f"{tmp_path}/alice:{tmp_path}/shared")
    assert submission.check(tree).model.path == tree["model"]["path"]
    foreign = write_rows(tmp_path / "alice-too" / "train.parquet", [PromptRow(0, "sums", "1", ground_truth="2")])
    refused = r"data\.files: .*: lies outside the folders that jobs may use.*alice, .*shared, .*MILLRACE_ROOTS"
    with pytest.raises(InvalidJob, match=refused):
        submission.check(tree | {"data": {"files": [str(foreign)]}})
    with pytest.raises(InvalidJob, match=r"output: .*: lies outside"):
        submission.check(tree | {"output": f"{tmp_path}/alice/../out"})
    link = tmp_path / "alice" / "link.parquet"
    link.symlink_to(foreign)
    for files in (str(link), f"{tmp_path}/alice/li*.parquet"):
        with pytest.raises(InvalidJob, match=r"data\.files: .*: leads outside"):
            submission.check(tree | {"data": {"files": [files]}})
    with pytest.raises(InvalidJob, match=r"reward\.function: .*secrets\.py:score.*: lies outside"):
        submission.check(tree | {"reward": {"function": f"{tmp_path}/secrets.py:score"}})


@pytest.mark.parametrize(
    ("made", "words"),
    [(None, "there is no folder"), (300, "has a vocabulary of 300 tokens")],
)
def test_one_that_cannot_judge_the_policy_is_refused(made: int | None, words: str, tmp_path: Path) -> None:
    if made is not None:
        model_folder(tmp_path / "critic", tokens=made)
    with pytest.raises(InvalidJob, match=rf"algorithm\.critic\.path: .*: {words}"):
        submission.check(job(tmp_path, {"path": str(tmp_path / "critic")}))


def test_an_advantage_without_its_critic_is_told_with_all_else(tmp_path: Path) -> None:
    tree = job(tmp_path, {}) | {"algorithm": {"advantage": {"name": "gae"}, "aggregation": "mean"}, "output": "here"}
    with pytest.raises(InvalidJob) as refusal:
        submission.check(tree)
    for words in ("it needs a critic", 'algorithm.aggregation: "mean"', 'output: "here"'):
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 2000}, 2000),
        ({"text_config": {"max_position_embeddings": 2000}}, 2000),
        ({"max_position_embeddings": 2048}, None),
        ({}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 1024),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 512),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            None,
        ),
    ],
)
def test_a_text_that_is_longer_than_the_model_knows(
    config: dict[str, Any], longest: int | None, tmp_path: Path
) -> None:
    tree = job(tmp_path, {})
    file = Path(tree["model"]["path"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if longest is None:
        submission.check(tree)
        return
    words = rf"rollout\.max_response_tokens: 1024: .* 2048 tokens, .* positions up to {longest} "
    with pytest.raises(InvalidJob, match=words):
        submission.check(tree)
    submission.check(tree | {"rollout": {"engine_options": {"vllm": {"hf_overrides": {}}}}})


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"trainer": {"backend_options": {"atention": "sdpa"}}},
            "trainer.backend_options.atention: there is no such field. Fix: did you mean `attention`?",
        ),
        (
            {"trainer": {"backend_options": {"attention": "eager"}}},
            'trainer.backend_options.attention: "eager": is not one of the known values. Fix: choose one of auto,',
        ),
        (
            {"trainer": {"backend": "megatron", "backend_options": {"tensor_paralel": 2}}},
            "trainer.backend_options.tensor_paralel: there is no such field. Fix: did you mean `tensor_parallel`?",
        ),
        (
            {"trainer": {"backend": "megatron", "backend_options": {"tensor_parallel": True}}},
            "trainer.backend_options.tensor_parallel: true: is not a whole number.",
        ),
        (
            {"rollout": {"engine_options": {"dtype": "half"}}},
            "rollout.engine_options.dtype: a job cannot set this option. Fix: set rollout.dtype instead.",
        ),
        (
            {"rollout": {"engine_options": {"sglang": {"kv_cache_dtype": "fp8"}}}},
            "rollout.engine_options.sglang.kv_cache_dtype: a job cannot set this option. Fix: remove it",
        ),
        (
            {"rollout": {"engine_options": {"preferred_sampling_params": {"repetition_penalty": 1.1}}}},
            "a job cannot set this option. Fix: set rollout.temperature, rollout.top_p, rollout.top_k and rollout.stop",
        ),
        (
            {"rollout": {"engine_options": {"vllm": {"speculative_config": {"model": "draft"}}}}},
            'rollout.engine_options.vllm.speculative_config: {"model": "draft"}: publications do not reach the weights',
        ),
        (
            {"rollout": {"engine_options": {"enable_eplb": True}}},
            "rollout.engine_options.enable_eplb: true: experts would move or multiply after the replica learned",
        ),
        (
            {"rollout": {"engine_options": {"sglang": {"ep_num_redundant_experts": 8}}}},
            "rollout.engine_options.sglang.ep_num_redundant_experts: 8: experts would move",
        ),
        (
            {"rollout": {"engine_options": {"speculative_algorithm": "EAGLE"}}},
            "rollout.engine_options.speculative_algorithm: ",
        ),
        (
            {"rollout": {"engine_options": {"vlm": {"max_num_seqs": 4}}}},
            "rollout.engine_options.vlm: there is no such engine. Fix: did you mean `vllm`? The engines are ",
        ),
    ],
)
def test_options_that_nobody_would_take(part: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob) as refusal:
        submission.check(job(tmp_path, {}) | part)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"vllm": {"max_num_seqz": 4}},
            "rollout.engine_options.vllm.max_num_seqz: vLLM has no such option. Fix: did you mean `max_num_seqs`?",
        ),
        ({"max_num_seqz": 4}, "rollout.engine_options.max_num_seqz: there is no such option of "),
        ({"max_num_seqs": -1}, "rollout.engine_options.max_num_seqs: -1: is not from 1 to 65536. Fix: give a number"),
        ({"vllm": {"max_num_seqs": 2**60}}, "rollout.engine_options.vllm.max_num_seqs: 1152921504606846976: is not fr"),
        ({"vllm": {"max_num_seqs": "64"}}, 'rollout.engine_options.vllm.max_num_seqs: "64": is not a whole number.'),
        ({"vllm": {"enforce_eager": 1}}, "rollout.engine_options.vllm.enforce_eager: 1: is not true or false."),
        ({"gpu_memory_utilization": 90}, "rollout.engine_options.gpu_memory_utilization: 90: is not from 0.01 to 1."),
        ({"transformers": {"max_num_seqs": 0}}, "rollout.engine_options.transformers.max_num_seqs: 0: is not from 1"),
    ],
)
def test_options_of_engines_are_checked_by_the_source_of_those_that_are_here(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidJob) as refusal:
        submission.check(job(tmp_path, {}) | {"rollout": {"engine_options": options}})
    assert told in str(refusal.value)


def test_an_option_of_an_engine_that_is_not_here_is_left_to_it(tmp_path: Path) -> None:
    tree = job(tmp_path, {})
    for name, value in {"max_running_requests": 5, "schedule_policy": "fcfs", "tp_size": 2}.items():
        submission.check(tree | {"rollout": {"engine_options": {name: value}}})


@pytest.mark.parametrize("modules", [["core_attn"], ["moe"]])
def test_experts_are_not_replayed_where_they_are_recomputed_by_themselves(modules: list[str], tmp_path: Path) -> None:
    """The trainer refused it at its first step."""
    tree = job(tmp_path, {})
    config = QWEN3_30B_A3B | {"architectures": ["Qwen3MoeForCausalLM"]}
    (Path(tree["model"]["path"]) / "config.json").write_text(json.dumps(config))
    recompute = {"granularity": "selective", "modules": modules}
    tree |= {"trainer": {"backend": "megatron", "backend_options": {"recompute": recompute}}}
    tree |= {"algorithm": {"router_replay": True}}
    if modules == ["core_attn"]:
        submission.check(tree)
        return
    with pytest.raises(InvalidJob, match=r"backend_options\.recompute\.modules: .*router_replay.*Fix: set granularity"):
        submission.check(tree)


def test_a_job_that_needs_the_whole_batch_cannot_be_told_to_stream(tmp_path: Path) -> None:
    tree = job(tmp_path, {}) | {"algorithm": {"preset": "reinforce++"}}
    submission.check(tree | {"trainer": {"streaming": "auto"}})
    told = r'trainer\.streaming: true: algorithm\.advantage: .* over the whole batch. Fix: set it to "auto"'
    with pytest.raises(InvalidJob, match=told):
        submission.check(tree | {"trainer": {"streaming": True}})


def test_options_are_left_to_whom_they_belong_to(tmp_path: Path) -> None:
    options = {"kv_cache_dtype": "fp8", "compilation_config": {"level": 3}}
    options |= {"vllm": {"skip_tokenizer_init": False}, "sglang": {"a": 1}}
    trainer = {"backend_options": {"attention": "sdpa", "offload_parameters": True}}
    submission.check(job(tmp_path, {}) | {"rollout": {"engine_options": options}, "trainer": trainer})


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"output": "here"}, "output"),
        ({"model": {"path": "here"}}, "model.path"),
        ({"data": {"files": ["here/train.parquet"]}}, "data.files"),
        ({"evaluation": {"files": ["held_out.jsonl"]}}, "evaluation.files"),
        ({"reward": {"function": "here/mine.py:compute_score"}}, "reward.function"),
        ({"reward": {"function": "~/mine.py:compute_score"}}, "reward.function"),
        ({"rollout": {"environment": "mine.py:Mine"}}, "rollout.environment.name"),
        ({"reward": {"functions": [{"name": "a", "function": "mine.py:f"}]}}, "reward.functions.0.function"),
        ({"algorithm": {"advantage": "mine.py:mine"}}, "algorithm.advantage.name"),
        ({"algorithm": {"policy_loss": {"name": "./mine.py:mine"}}}, "algorithm.policy_loss.name"),
        ({"algorithm": {"correction": "mine.py:mine"}}, "algorithm.correction.name"),
        ({"algorithm": {"preset": "ppo", "critic": {"path": "here"}}}, "algorithm.critic.path"),
    ],
)
def test_a_relative_path_is_refused(part: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob) as refusal:
        submission.check(job(tmp_path, {}) | part)
    (line,) = [line for line in str(refusal.value).splitlines() if "each service would look in its own" in line]
    assert line.startswith(f"  {field}: ") and line.endswith("Fix: write an absolute path.") == (field != "output")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"output": f"/{'a' * 300}"}, "output"),
        ({"model": {"path": f"/{'a' * 300}"}}, "model.path"),
        ({"data": {"files": [f"/{'a' * 300}.jsonl"]}}, "data.files"),
        ({"reward": {"function": f"/{'a' * 300}.py:f"}}, "reward.function"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(part: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=rf"  {field}: .*: is too long for the name of a file"):
        submission.check(job(tmp_path, {}) | part)


def test_one_that_is_there_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = job(tmp_path, {})
    with pytest.raises(InvalidJob, match=rf'data.files: "train.parquet": .* for example {tmp_path}/train.parquet\.$'):
        submission.check(tree | {"data": {"files": ["train.parquet"]}})


def test_functions_by_module_and_whole_paths_are_taken(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
        "def loss(*, logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, scale: float = 1.0): ...\n"
    )
    tree = job(tmp_path, {})
    algorithm = tree["algorithm"] | {"policy_loss": f"{own}:loss"}
    submission.check(tree | {"reward": {"function": f"{own}:score"}, "algorithm": algorithm})
    submission.check(tree | {"reward": {"function": "millrace.rewards.exact:compute_score"}})


def test_the_class_of_an_environment_is_looked_for(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from millrace.environments import Environment\nclass Mine(Environment): ...\nraise SystemExit\n")
    tree = job(tmp_path, {})
    spec = submission.check(tree | {"rollout": {"environment": f"{own}:Mine"}})
    assert spec.rollout.environment is not None and spec.rollout.environment.name == f"{own}:Mine"
    with pytest.raises(InvalidJob, match=rf"rollout.environment.name: .*{own} has no class Yours"):
        submission.check(tree | {"rollout": {"environment": {"name": f"{own}:Yours"}}})


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    tree = job(tmp_path, {})
    before = sorted(tmp_path.rglob("*"))
    submission.check(tree | {"output": str(tmp_path / "out" / "of" / "it")})
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    submission.check(tree)
    assert list((tmp_path / "out").rglob("*")) == [tmp_path / "out" / "checkpoints"]


@pytest.mark.parametrize("output", ["{}/file", "{}/file/out", "{}/half", "{}/gone", "/proc/out"])
def test_an_output_that_cannot_be_written_is_refused(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "checkpoints").touch()
    with pytest.raises(InvalidJob, match=r"output: .*: cannot be written: .*Fix: choose a folder"):
        submission.check(job(tmp_path, {}) | {"output": output.format(tmp_path)})


def test_weights_elsewhere_are_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model folder needs no weights then."""
    monkeypatch.chdir(tmp_path)
    tree = job(tmp_path, {})
    folder = Path(tree["model"]["path"])
    (folder / "model.safetensors").unlink()
    for weights, words in (
        (None, r'model\.path: ".*": has no weights'),
        ("checkpoint", r'model\.weights: "checkpoint": is not an absolute path'),
        (str(tmp_path / "nowhere"), r'model\.weights: ".*nowhere": there is no folder'),
        (str(folder), r'model\.weights: ".*": has no \.metadata'),
    ):
        with pytest.raises(InvalidJob, match=words):
            submission.check(tree | {"model": {"path": str(folder), "weights": weights}})


def test_rows_that_by_data_source_cannot_score_are_refused_by_their_source(tmp_path: Path) -> None:
    tree = job(tmp_path, {})
    with pytest.raises(InvalidJob, match=r'reward\.function: "by_data_source": there is no rule for .*\'sums\''):
        submission.check(tree | {"reward": {"function": "by_data_source"}})
    functions = [{"name": "a", "function": "exact"}, {"name": "b", "function": "by_data_source"}]
    with pytest.raises(InvalidJob, match=r'reward\.functions\.1\.function: "by_data_source": there is no rule'):
        submission.check(tree | {"reward": {"functions": functions}})
    rows = write_rows(tmp_path / "gsm8k.parquet", [PromptRow(0, "openai/gsm8k", "1 + 1 =", ground_truth="2")])
    submission.check(tree | {"reward": {"function": "by_data_source"}, "data": {"files": [str(rows)]}})


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({"prompt": "{{anser}}"}, r"judge\.prompt: .*\{\{anser\}\} is not known with scope: answer"),
        ({"prompt": "{{answers}}"}, r"judge\.prompt: .*\{\{answers\}\} is not known"),
        ({"prompt": "Rate it: {{prompt}}"}, r"judge\.prompt: .*it shows no answer: write \{\{answer\}\}"),
        ({"prompt_file": "judge.txt"}, r"judge\.prompt_file: .*is not an absolute path"),
        ({"prompt_file": "/nowhere/judge.txt"}, r"judge\.prompt_file: .*cannot be read: No such file"),
        ({"prompt_file": "/dev/null"}, r"judge\.prompt_file: .*cannot be read: it is not a regular file"),
        ({"prompt": "{{answer}}", "pattern": "("}, r'judge\.pattern: "\(": is not a regular expression'),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judge: dict[str, Any], words: str, tmp_path: Path) -> None:
    whole = {"url": "http://judge:8000/v1", "model": "j", **judge}
    reward = {"functions": [{"name": "quality", "judge": whole}]}
    with pytest.raises(InvalidJob, match=rf"reward\.functions\.0\.{words}"):
        submission.check(job(tmp_path, {}) | {"reward": reward})


def test_a_judge_may_be_the_whole_reward(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("Rate {{ answers }}")
    judge = {"url": "http://judge:8000/v1", "model": "j", "prompt_file": str(tmp_path / "judge.txt")}
    reward = {"functions": [{"name": "quality", "scope": "group", "judge": judge}]}
    assert submission.check(job(tmp_path, {}) | {"reward": reward}).reward.judge_terms[0].scope == "group"


def with_lora(folder: Path, **lora: Any) -> dict[str, Any]:
    tree = job(folder, {})
    return {**tree, "model": {**tree["model"], "lora": lora}, "algorithm": {}}


def test_a_job_has_the_options_of_the_adapter_that_it_trains_further(tmp_path: Path) -> None:
    stored = str(write_folder(tmp_path / "adapter", lora_alpha=4))
    lora = submission.check(with_lora(tmp_path, adapter_path=stored)).model.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.target_modules) == (RANK, 4.0, ["down_proj", "q_proj"])
    tree = with_lora(tmp_path / "policy", **lora.model_dump(mode="json"))
    assert submission.check(tree).model.lora == lora  # checked again, as when the job is continued


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"adapter_path": "adapter"}, 'model.lora.adapter_path: "adapter": is not an absolute path'),
        ({"adapter_path": "/nowhere"}, 'model.lora.adapter_path: "/nowhere": there is no such folder'),
        ({"target_modules": []}, "model.lora.target_modules: []: no layer would have an adapter"),
    ],
    ids=str,
)
def test_an_adapter_that_no_trainer_could_load(lora: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob) as refusal:
        submission.check(with_lora(tmp_path, **lora))
    assert told in str(refusal.value)
