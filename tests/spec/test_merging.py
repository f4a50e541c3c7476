from millrace.spec.document import Document, merged
from millrace.validation.kinds import leaves


def test_fields_that_the_changes_do_not_name_stay() -> None:
    tree = {"schedule": {"steps": 2, "prompts_per_step": 4}, "data": {"files": ["a", "b"]}}
    changed = merged(tree, {"schedule": {"steps": 7}, "data": {"files": ["c"]}, "output": "/o"})
    assert changed == {
        "schedule": {"steps": 7, "prompts_per_step": 4},
        "data": {"files": ["c"]},
        "output": "/o",
    }
    assert tree["schedule"] == {"steps": 2, "prompts_per_step": 4}


def test_null_removes_an_option_and_is_a_value_elsewhere() -> None:
    tree = {"rollout": {"engine_options": {"vllm": {"a": 1}, "b": 2}}, "evaluation": {"files": []}}
    changed = merged(tree, {"rollout": {"engine_options": {"vllm": {"a": None}}}, "evaluation": None})
    assert changed == {"rollout": {"engine_options": {"vllm": {}, "b": 2}}, "evaluation": None}


def test_leaves_are_the_fields_without_fields() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}


def test_a_field_that_was_changed_has_no_line() -> None:
    document = Document("name: x\nschedule:\n  steps: 2\n  prompts_per_step: 4\n")
    document.change({"schedule": {"steps": 7}})
    assert document.tree["schedule"] == {"steps": 7, "prompts_per_step": 4}
    assert [document.line_of(field) for field in ("name", "schedule.steps", "schedule.prompts_per_step")] == [1, 0, 4]


def test_a_text_that_is_no_mapping_stays_as_it_is() -> None:
    document = Document("[1, 2]")
    document.change({"name": "x"})
    assert document.tree == [1, 2]


def test_another_function_does_not_get_the_options_of_the_one_before() -> None:
    loss = {"name": "ppo", "options": {"clip_low": 0.2, "clip_high": 0.28}}
    tree = {"name": "job", "algorithm": {"policy_loss": loss, "aggregation": "token-mean"}}

    def after(change: object) -> object:
        return merged(tree, {"name": "other", "algorithm": {"policy_loss": change}})["algorithm"]["policy_loss"]

    assert after({"name": "mine", "options": {"negative": 0.3}}) == {"name": "mine", "options": {"negative": 0.3}}
    assert after({"name": "mine"}) == {"name": "mine"}
    assert after({"options": {"clip_low": 0.1}}) == {"name": "ppo", "options": {"clip_low": 0.1, "clip_high": 0.28}}
    assert after({"name": "ppo", "options": {"clip_low": 0.1}}) == after({"options": {"clip_low": 0.1}})
    assert merged(tree, {"name": "other"})["algorithm"] == tree["algorithm"]
