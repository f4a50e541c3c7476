import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from millrace.backends.megatron import MegatronOptions
from millrace.errors import InvalidJob
from millrace.spec import JobSpec, load, parse
from millrace.validation.fields import model_in

SMALLEST = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}


def with_(path: str, value: object) -> dict:
    tree = json.loads(json.dumps(SMALLEST))
    *parents, last = path.split(".")
    part = tree
    for name in parents:
        part = part.setdefault(name, {})
    part[last] = value
    return tree


def refusal(tree: object) -> str:
    with pytest.raises(InvalidJob) as error:
        parse(tree)
    return str(error.value)


def test_the_smallest_job_is_valid_and_survives_json():
    spec = parse(SMALLEST)
    assert parse(json.loads(spec.model_dump_json())) == spec


@pytest.mark.parametrize("suffix, dump", [("yaml", yaml.safe_dump), ("json", json.dumps)])
def test_files_in_yaml_and_json(tmp_path, suffix, dump):
    path = tmp_path / f"job.{suffix}"
    path.write_text(dump(SMALLEST))
    assert load(path) == parse(SMALLEST)


@pytest.mark.parametrize(
    "path, value, told",
    [
        ("rolout", {}, "rolout: there is no such field. Fix: did you mean `rollout`?"),
        ("rollout.temprature", 1, "rollout.temprature: there is no such field. Fix: did you mean `temperature`?"),
        ("trainer.optimizer.learning", 1, "trainer.optimizer.learning: there is no such field."),
        ("trainer.optimizer.lr", -1, "trainer.optimizer.lr: -1: is less than 0. Fix: "),
        ("trainer.optimizer.lr", -1, "give a number that is at least 0."),
        ("rollout.top_p", 1.5, "give a number that is at most 1."),
        ("rollout.stop", ["</answer>", ""], 'rollout.stop.1: "": has fewer than 1 characters. Fix: '),
        ("rollout.dtype", "fp4", "is not one of the known values. Fix: choose one of bfloat16, float32, float16."),
        ("schedule.steps", "many", "Fix: give a whole number."),
        ("deadlines.step_s", math.inf, "deadlines.step_s: Infinity: is not a finite number"),
        ("trainer.optimizer.betas", [0.9, math.nan], "trainer.optimizer.betas.1: NaN: "),
        ("reward.options", {"at": [1, -math.inf]}, 'reward.options: {"at": [1, -Infinity]}: '),
        (
            "rollout.engine_options",
            {"vllm": {"x": math.nan}},
            "a number that is not finite. Fix: give finite numbers.",
        ),
        ("trainer.token_budget", 100, "1024 + 1024 = 2048 tokens"),
        ("schedule.steps", 0, "only evaluates, and there is no evaluation"),
        ("trainer.updates_per_step", 7, "64 groups do not divide into 7 updates"),
        ("data.files", [], "neither data.files nor data.procedural is given"),
        (
            "data.procedural",
            "reasoning_gym:sum",
            "both data.files and data.procedural are given. Fix: ",
        ),
        ("rollout.engine_options", {"max_model_len": 512}, "raise it to at least 2048"),
        ("algorithm.overlong_buffer_tokens", 5000, "the buffer is longer than a response, 1024 tokens"),
        ("algorithm.kl_in", "reward", "there is no KL"),
        ("trainer.reference.token_budget", 4096, "trainer.reference.token_budget: 4096: the job has no reference"),
        ("trainer.critic", {"token_budget": 100}, "trainer.critic.token_budget: 100: one trajectory may have 2048"),
        ("trainer.critic", {"token_budget": 100}, "the job has no critic, because it has no algorithm.critic"),
        (
            "trainer.reference",
            {"backend_options": {"attention": "sdpa"}},
            'trainer.reference.backend_options.attention: "sdpa": the reference has the policy',
        ),
        ("algorithm.kl_coefficient", 0.01, "algorithm.kl_coefficient: 0.01: there is no KL for it to weigh"),
        ("trainer.optimizer.betas", [0.9, 1.0], "trainer.optimizer.betas.1: 1.0: "),
        ("trainer.optimizer.betas", [0.9, 1.0], "give a number that is less than 1."),
        ("model", {}, "model.path: is missing. Fix: add it."),
        ("name", "", "name: "),
        ("model", "Qwen/Qwen3-0.6B", "Fix: give a mapping, for example `model: {path: /data/models/Qwen3-0.6B}`."),
        ("data", "train.parquet", "give a mapping, for example `data: {files: [/data/train.parquet]}`."),
        ("data.files", "train.parquet", "give a list, for example `files: [/data/train.parquet]`, or leave it out."),
        ("algorithm", "dapo", "give a mapping, for example `algorithm: {preset: grpo}`, or leave it out."),
        ("algorithm.correction", 2, "give a mapping, for example `correction: {name: tis_token}`, or leave it out."),
        ("algorithm.correction", ["tis_token", 2], "algorithm.correction.1: 2: is not a mapping. Fix: give a mapping."),
        ("algorithm.correction", {"nme": "tis_token"}, "algorithm.correction.nme: there is no such field."),
        ("algorithm.correction", [{"nme": "tis_token"}], "algorithm.correction.0.name: is missing."),
        ("algorithm.correction", [], "algorithm.correction: []: has fewer than 1 entries. Fix: give a mapping,"),
        ("algorithm.correction", ["reject_token"] * 9, "has more than 8 entries"),
        (
            "algorithm.correction",
            [{"name": "tis_token", "options": {"cap": math.inf}}],
            "algorithm.correction.0.options: ",
        ),
        ("rollout", None, "rollout: null: is not a mapping. Fix: give a mapping, for example"),
        ("rollout.engine_options", None, "for example `engine_options: {max_num_seqs: 256}`, or leave it out."),
        ("rollout.engine_options", {"vllm": None}, "rollout.engine_options.vllm: null: is not a mapping of vllm's"),
        ("rollout.engine_options", {"vllm": None}, "example `vllm: {max_num_seqs: 256}`, or leave it out."),
        ("trainer.optimizer.betas", 0.9, "give a list, for example `betas: [0.9, 0.95]`, or leave it out."),
        ("trainer.optimizer.betas", [0.9, 0.9, 0.9], "betas: [0.9, 0.9, 0.9]: "),
        ("schedule.steps", True, "schedule.steps: true: is not a whole number. Fix: give a whole"),
        ("trainer.optimizer.lr", False, "trainer.optimizer.lr: false: is not a number."),
    ],
)
def test_a_mistake_is_told_with_field_value_reason_and_fix(path, value, told):
    assert told in refusal(with_(path, value))


def test_every_mapping_and_list_has_an_example_that_is_valid():
    def fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in model.model_fields.items():
            yield name, field
            if (inner := model_in(field.annotation)) is not None:
                yield from fields(inner)

    for name, field in [*fields(JobSpec), *fields(MegatronOptions)]:
        kind = get_origin(field.annotation)
        if model_in(field.annotation) is not None or kind in (list, tuple, dict):
            assert field.examples, f"{name} has no example"
            TypeAdapter(field.annotation).validate_python(field.examples[0])


def test_a_function_may_be_given_by_its_name_alone():
    algorithm = parse(with_("algorithm", {"advantage": "rloo", "kl": "k3"})).algorithm
    assert algorithm.advantage.name == "rloo" and algorithm.kl is not None and algorithm.kl.name == "k3"


def test_one_correction_or_a_list_of_them_is_kept_as_it_was_written():
    several = ["tis_token", {"name": "reject_token", "options": {"limit": 0.1}}]
    for written, names in (("tis_token", ["tis_token"]), (several, ["tis_token", "reject_token"]), (None, [])):
        spec = parse(with_("algorithm.correction", written))
        assert [correction.name for correction in spec.algorithm.corrections] == names
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
        assert isinstance(
            spec.model_dump(mode="json")["algorithm"]["correction"], type(written) if names[1:] else object
        )


def test_every_mistake_is_told_at_once():
    tree = with_("rollout.top_p", 2) | {"typo": 1}
    message = refusal(tree)
    assert "rollout.top_p" in message and "typo" in message


@pytest.mark.parametrize("tree", [None, [], "name", 3])
def test_what_is_no_mapping(tree):
    assert "a job spec is a mapping of fields" in refusal(tree)


def test_a_file_that_is_missing_or_not_yaml(tmp_path):
    with pytest.raises(InvalidJob, match="No such file or directory"):
        load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(InvalidJob, match="neither YAML nor JSON"):
        load(broken)


def leaves(part: type) -> int:
    count = 0
    for field in part.model_fields.values():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((k for k in kinds if hasattr(k, "model_fields")), None)
        count += leaves(inner) if inner else 1
    return count


@pytest.mark.parametrize(
    "text, told",
    [
        ("rollout: {engine_options: &a {x: *a}}", "rollout.engine_options.x (line 1): contains itself"),
        ("output: !!binary gICAgA==", "output (line 1): "),
        ('name: "\\0"', 'name (line 1): "\\u0000": has '),
        ("schedule: {steps: !!int ''}", "is neither YAML nor JSON"),
    ],
)
def test_what_yaml_can_say_and_no_job(tmp_path, text, told):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidJob) as error:
        load(path)
    assert told in str(error.value) and "Fix: " in str(error.value)


def test_the_tree_is_small_and_every_unclear_leaf_is_explained():
    assert leaves(JobSpec) < 217


def test_a_role_has_the_policys_values_and_its_own():
    tree = with_("algorithm", {"preset": "ppo"})
    tree["trainer"] = {
        "token_budget": 4096,
        "backend_options": {"offload_parameters": True, "logprob_chunk_tokens": 64},
        "reference": {"token_budget": 8192, "backend_options": {"offload_parameters": None}},
        "critic": {"activation_recompute": True, "backend_options": {"offload_activations": True}},
    }
    trainer = parse(tree).trainer
    reference, critic = trainer.of("reference"), trainer.of("critic")
    assert (reference.token_budget, reference.activation_recompute) == (8192, False)
    assert reference.backend_options == {"logprob_chunk_tokens": 64}
    assert (critic.token_budget, critic.activation_recompute) == (4096, True)
    assert critic.backend_options == {**trainer.backend_options, "offload_activations": True}
    assert trainer.of("reference").optimizer == trainer.optimizer


def test_an_engine_gets_the_options_for_all_and_its_own():
    told = {"dtype": "auto", "vllm": {"max_num_seqs": 4, "dtype": "half"}, "sglang": {"tp_size": 2}}
    rollout = parse(with_("rollout.engine_options", told)).rollout
    assert rollout.options_of("vllm") == {"max_num_seqs": 4, "dtype": "half"}
    assert rollout.options_of("sglang") == {"dtype": "auto", "tp_size": 2}
    assert rollout.options_of("transformers") == {"dtype": "auto"}
    assert "sglang: 3: is not a mapping" in refusal(with_("rollout.engine_options", {"sglang": 3}))
    short = {"vllm": {"max_model_len": 8}}
    assert "rollout.engine_options.vllm.max_model_len: 8: " in refusal(with_("rollout.engine_options", short))


def test_carried_and_stale_answers_need_what_makes_them_of_use():
    assert parse(with_("schedule", {"carried_prompts": 8})).schedule.carried_prompts == 8
    strict = {"carried_prompts": 8, "max_staleness": 0}
    assert "schedule.carried_prompts: 8: answers that go on" in refusal(with_("schedule", strict))
    assert 'schedule.too_stale: "train": nothing would weigh' in refusal(with_("schedule", {"too_stale": "train"}))
    corrected = with_("schedule", strict | {"too_stale": "train"}) | {
        "algorithm": {"correction": {"name": "tis_token"}}
    }
    assert parse(corrected).schedule.too_stale == "train"


def test_a_group_of_one_has_no_signal_to_keep_it():
    tree = with_("rollout.samples_per_prompt", 1)
    assert "rollout.samples_per_prompt: 1: the rewards in a group of one" in refusal(
        tree | {"algorithm": {"drop_groups_without_signal": True}}
    )
    assert parse(tree).rollout.samples_per_prompt == 1


def test_the_smallest_group_is_no_larger_than_a_group_and_large_enough_to_compare():
    assert parse(with_("rollout.min_samples", 2)).rollout.smallest_group == 2
    assert "rollout.min_samples: 900: a group has" in refusal(with_("rollout.min_samples", 900))
    alone = with_("rollout.min_samples", 1)
    quick = {"drop_groups_without_signal": True, "advantage": "remax"}
    assert "rollout.min_samples: 1: the rewards in a group of one" in refusal(alone | {"algorithm": quick})


def test_a_coefficient_of_no_kl_is_taken_where_it_says_nothing():
    for value in (0.0, 0.001):
        assert parse(with_("algorithm.kl_coefficient", value)).algorithm.kl is None
    assert parse(with_("algorithm", {"kl": "k3", "kl_coefficient": 0.04})).algorithm.kl_coefficient == 0.04


def test_a_short_trial_keeps_the_whole_job_s_saving():
    assert parse(with_("schedule", {"steps": 2, "save_every_steps": 100})).schedule.steps == 2


def test_imports_little_and_neither_torch_nor_an_engine():
    """Every command that reads a job waits for the import."""
    code = "import sys, millrace.spec; print(len(sys.modules), *{'torch', 'vllm', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, *loaded = run.stdout.split()
    assert not loaded and int(modules) < 400


JUDGE = {"url": "http://judge:8000/v1", "model": "j", "prompt": "{{answer}}"}
FORMAT, RIGHT = {"function": "format", "name": "format"}, {"function": "math", "name": "right", "weight": 2}


def test_several_functions_become_terms_with_their_fields():
    spec = parse(with_("reward.functions", [FORMAT, {**RIGHT, "function": "auto"}]))
    told = [(t.function, t.weight, t.name, t.field) for t in spec.reward.terms(procedural=True)]
    assert told == [
        ("format", 1.0, "format", "reward.functions.0"),
        ("reasoning_gym", 2.0, "right", "reward.functions.1"),
    ]
    assert spec.reward.reported == ["format", "right"]


def test_judges_are_parts_of_the_reward_beside_functions():
    judged = {"name": "quality", "judge": JUDGE, "weight": 0.5, "scope": "group"}
    spec = parse(with_("reward.functions", [FORMAT, judged]))
    assert [term.name for term in spec.reward.terms(procedural=True)] == ["format"]
    (term,) = spec.reward.judge_terms
    assert (term.judge.model, term.name, term.weight, term.scope) == ("j", "quality", 0.5, "group")
    assert term.field == "reward.functions.1.judge"
    assert spec.reward.reported == ["format", "quality"]


@pytest.mark.parametrize(
    "reward, told",
    [
        ({"functions": [FORMAT], "function": "math"}, 'reward.function: "math": reward.functions is given too'),
        ({"functions": [FORMAT], "scope": "group"}, 'reward.scope: "group": reward.functions is given too'),
        ({"functions": [FORMAT], "options": {"a": 1}}, "reward.options: "),
        (
            {"functions": [FORMAT, {**RIGHT, "name": "format"}]},
            'reward.functions.1.name: "format": an earlier function',
        ),
        ({"functions": [{**RIGHT, "name": "score"}]}, 'reward.functions.0.name: "score": is the name of the sum'),
        ({"functions": [{**RIGHT, "weight": 0}]}, "every weight is 0"),
        ({"functions": [{**RIGHT, "weight": 1e9}]}, "reward.functions.0.weight: "),
        ({"functions": [{"function": "math"}]}, "reward.functions.0.name: "),
        (
            {"functions": [{"name": "a"}]},
            'reward.functions.0.name: "a": neither a function nor a judge nor a pool is given',
        ),
        ({"functions": [{**RIGHT, "judge": JUDGE}]}, 'reward.functions.0.function: "math": a judge is given too'),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "url": "judge:8000"}}]}, "reward.functions.0.judge.url: "),
        (
            {"functions": [{"name": "a", "judge": {**JUDGE, "url": "http://a:b@c/v1"}}]},
            "reward.functions.0.judge.url: ",
        ),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "scale": [1]}}]}, "reward.functions.0.judge.scale: "),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "scale": [1, 1]}}]}, "both ends are the same number"),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "prompt_file": "/a"}}]}, "both prompt and prompt_file"),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "prompt": None}}]}, "neither prompt nor prompt_file"),
        ({"functions": [{"name": "a", "judge": {**JUDGE, "options": {"n": 2}}}]}, "judge.options.n: 2: "),
        ({"functions": [{"name": "a", "judge": JUDGE, "options": {"a": 1}}]}, "a judge has its own"),
    ],
)
def test_several_functions_that_cannot_be_summed_are_refused(reward, told):
    assert told in refusal(with_("reward", reward))


def test_images_are_refused_with_what_was_not_shown_to_be_right_with_them():
    tree = with_("data.images", {})
    assert parse(tree).data.images.max_per_prompt == 4
    adapted = parse({**tree, "model": {**tree["model"], "lora": {"rank": 8}}})
    assert adapted.data.images is not None and adapted.model.publishes_adapter
    others = {
        "algorithm.critic": {},
        "rollout.environment": {"name": "games:Hunt"},
        "data.prompt_format": "text",
        "data.overlong_prompts": "truncate_left",
    }
    for path, value in others.items():
        section, name = path.split(".")
        told = refusal({**tree, section: {**tree.get(section, {}), name: value}})
        assert path in told and "data.images" in told and "Fix:" in told, told


def test_a_trained_tower_needs_images_and_full_weights_on_a_backend_that_trains_it():
    images, tower = with_("data.images", {}), {"train_tower": True}
    assert parse({**images, "trainer": tower}).trainer.train_tower and not parse(images).trainer.train_tower
    for tree, trainer, told in (
        (SMALLEST, tower, "no prompt has an image"),
        ({**images, "model": {**SMALLEST["model"], "lora": {"rank": 8}}}, tower, "has no adapter for its tower"),
        (images, {**tower, "backend": "megatron"}, "the backend megatron keeps the tower frozen"),
    ):
        refused = refusal({**tree, "trainer": trainer})
        assert "trainer.train_tower" in refused and told in refused and "Fix:" in refused, refused
