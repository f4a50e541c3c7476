"""From a reward's name to its function: `check` without running it, `load` by running it; both refuse the same."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.errors import InvalidJob
from millrace.rewards import BUILT_IN, check, choose, load
from millrace.sandbox import program

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
ARGUMENTS = {"data_source": "d", "solution_str": "four", "ground_truth": "4", "extra_info": {}}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / f"reward_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        return f"{path}:compute_score"

    return write


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_reward_passes_its_check_and_loads(name: str) -> None:
    check(name)
    if name == "code" and program.missing():
        with pytest.raises(InvalidJob, match="does not give"):
            load(name)
        return
    assert callable(load(name))


def test_a_file_of_the_users_loads_unchanged(write: Callable[[str], str]) -> None:
    name = write(GOOD)
    check(name)
    assert load(name)(**ARGUMENTS) == 4


def test_a_module_of_the_users_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "our_rewards_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    check("our_rewards_pkg.mine:compute_score")
    assert load("our_rewards_pkg.mine:compute_score")(**ARGUMENTS) == 4


def test_a_file_finds_its_siblings(
    write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sibling_of_reward.py").write_text("BONUS = 3\n")
    name = write("from sibling_of_reward import BONUS\n" + GOOD.replace("len(solution_str)", "BONUS"))
    assert load(name)(**ARGUMENTS) == 3


def test_an_async_function_is_run_to_its_end_on_one_loop(write: Callable[[str], str]) -> None:
    name = write(
        "import asyncio\nloops = set()\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    await asyncio.sleep(0)\n    loops.add(id(asyncio.get_running_loop()))\n    return len(loops)\n"
    )
    check(name)
    function = load(name)
    assert [function(**ARGUMENTS) for _ in range(3)] == [1, 1, 1]


def test_options_reach_the_function(write: Callable[[str], str]) -> None:
    source = GOOD.replace("extra_info=None", "extra_info, *, factor, **kwargs").replace(
        "len(solution_str)", "factor * len(solution_str) + kwargs.get('bonus', 0)"
    )
    name = write(source)
    check(name, {"factor": 2, "bonus": 1})
    assert load(name, {"factor": 2, "bonus": 1})(**ARGUMENTS) == 9


def test_check_runs_nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loud_pkg"
    package.mkdir()
    for file in ("__init__.py", "mine.py"):
        (package / file).write_text("raise RuntimeError('this ran')\n" + GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    check("loud_pkg.mine:compute_score")
    check(f"{package / 'mine.py'}:compute_score")
    assert "loud_pkg" not in sys.modules


def test_check_of_every_built_in_needs_neither_torch_nor_the_scorers_libraries() -> None:
    code = (
        "import sys\nfrom millrace.rewards import BUILT_IN, check\n"
        "for name in BUILT_IN: check(name)\n"
        "assert not {'torch', 'math_verify', 'sympy', 'reasoning_gym'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "source",
    [
        "def make():\n    pass\ncompute_score = make()\n",
        "from os.path import join as compute_score\n",
        "from os.path import *\n",
        "@print\ndef compute_score(x):\n    pass\n",
        "class compute_score:\n    pass\n",
        f"try:\n    import json\nexcept ImportError:\n    pass\nelse:\n    {GOOD.replace(chr(10), chr(10) + '    ')}\n",
    ],
)
def test_check_lets_pass_what_only_running_the_file_tells(source: str, write: Callable[[str], str]) -> None:
    check(write(source))


WRONG = [
    ("def other(a):\n    pass\n", {}, "has no function compute_score"),
    ("x = 1\n", {}, "defines no function|has no function"),
    ("def compute_score(a, b, c, d):\n    pass\n", {}, "does not take data_source, solution_str"),
    ("def compute_score(data_source, solution_str, ground_truth):\n    pass\n", {}, "does not take extra_info"),
    (
        "def compute_score(data_source, solution_str, ground_truth, extra_info, /):\n    pass\n",
        {},
        "does not take data_source",
    ),
    (GOOD.replace("extra_info=None", "extra_info, weight"), {}, "needs weight"),
    (GOOD, {"weight": 1}, "does not take the options weight"),
    (GOOD.replace("extra_info=None", "**anything"), {"extra_info": 1}, "names of arguments"),
    ("def compute_score(:\n", {}, "not readable as Python|invalid syntax"),
]


@pytest.mark.parametrize("act", [check, load])
@pytest.mark.parametrize(("source", "options", "reason"), WRONG)
def test_check_and_load_refuse_the_same(
    act: Callable, source: str, options: dict, reason: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(InvalidJob, match=reason) as refused:
        act(write(source), options)
    assert refused.value.what.startswith("reward.")
    assert refused.value.fix


@pytest.mark.parametrize("act", [check, load])
@pytest.mark.parametrize("signature", ["args, sample", "args, sample, **kwargs", "args, samples, *rest, **kwargs"])
def test_another_trainer_s_signature_is_told_which_one_is_wanted(
    act: Callable, signature: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(InvalidJob, match=r"^reward\.function: ") as refused:
        act(write(f"async def compute_score({signature}):\n    return 1.0\n"), {})
    assert "compute_score(data_source, solution_str, ground_truth, extra_info=None, **options)" in refused.value.fix


@pytest.mark.parametrize("act", [check, load])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("maths", "did you mean `math`"),
        ("nonsense", "not a built-in reward"),
        ("no/such/file.py:compute_score", "there is no file"),
        ("no_such_module_here:compute_score", "there is no module no_such_module_here"),
        ("json.no_such_part:compute_score", "there is no module json.no_such_part"),
        ("json:", "not a built-in reward"),
        ("a b:compute_score", "there is no module a b"),
    ],
)
def test_a_name_that_means_nothing_is_refused(act: Callable, name: str, reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason) as refused:
        act(name)
    assert "reward.function" in str(refused.value) and "Fix:" in str(refused.value)


@pytest.mark.parametrize("act", [check, load])
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("regex", {"pattern": "("}, "not a regular expression"),
        ("exact", {"ignore_case": "yes"}, "true or false"),
        ("exact", {"extract": 3}, "extract has to be a regular expression"),
        ("format", {"pattern": None}, "pattern has to be a regular expression"),
        ("math", {"boxed": True}, "does not take the options boxed"),
    ],
)
def test_wrong_options_of_a_built_in_are_refused(act: Callable, name: str, options: dict, reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason) as refused:
        act(name, options)
    assert refused.value.what.startswith("reward.options: {")


def test_load_names_a_dependency_that_is_missing(write: Callable[[str], str]) -> None:
    name = write("import no_such_dependency\n" + GOOD)
    check(name)
    with pytest.raises(InvalidJob, match="No module named 'no_such_dependency'"):
        load(name)


def test_load_refuses_what_is_no_function(write: Callable[[str], str]) -> None:
    with pytest.raises(InvalidJob, match=r"compute_score in .* is a whole number, not a function"):
        load(write("compute_score = 3\n"))


def test_auto_is_settled_by_the_source() -> None:
    assert choose("auto", procedural=True) == "reasoning_gym"
    assert choose("auto", procedural=False, style="rule") == "math"
    assert choose("exact", procedural=True) == "exact"
    with pytest.raises(InvalidJob, match="in the data is 'model'"):
        choose("auto", procedural=False, style="model")


GROUP = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [0.0]\n"


@pytest.mark.parametrize("act", [check, load])
def test_a_function_of_groups_takes_verls_batch_signature(act: Callable, write: Callable[[str], str]) -> None:
    act(write(GROUP), {}, "group")
    with pytest.raises(InvalidJob, match=r"reward\.function: .* does not take data_source, solution_str") as refused:
        act(write(GROUP))
    assert "set reward.scope to group" in refused.value.fix
    with pytest.raises(InvalidJob, match="does not take data_sources, solution_strs") as refused:
        act(write(GOOD), {}, "group")
    assert "set reward.scope to answer" in refused.value.fix
    assert "compute_score(data_sources, solution_strs, ground_truths, extra_infos" in refused.value.fix
    with pytest.raises(InvalidJob, match=r"names of arguments"):
        act(write(GROUP.replace("extra_infos", "extra_infos, **more")), {"solution_strs": []}, "group")


@pytest.mark.parametrize("act", [check, load])
def test_a_built_in_reward_scores_no_groups(act: Callable) -> None:
    with pytest.raises(InvalidJob, match=r"reward\.scope: .group.: the reward exact scores one answer at a time"):
        act("exact", {}, "group")
