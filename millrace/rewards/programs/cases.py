"""The test cases of a row, in the forms in which data sets of programming tasks have them.

    {"inputs": [...], "outputs": [...]}                   standard input and output: codecontests, apps, taco
    {"inputs": [...], "outputs": [...], "fn_name": f}     arguments and result of a function: apps, taco
    [{"input": ..., "output": ...}, ...]                  the same, case by case; a case may have `fn_name`
    {"assert_case": ["assert f(1) == 2", ...]}            statements that raise nothing: verl
    {"test_list": [...], "test_setup_code": ...}          the same: mbpp
    ["assert f(1) == 2", ...]                             the same
    {"test": "def check(candidate): ...", "entry_point": f}   humaneval; with `prompt`, answers may continue it

Each may be JSON text.
"""

import json
import math
import secrets
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.sandbox.program import Ended, Program

ANSWER = "answer.py"
"""Name of the file with the code of the answer, in the working folder."""
_PACKAGES = sorted({sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")})
_START = f"""
import site, sys
site.setquit()
sys.path += {_PACKAGES!r}
sys.argv = [{ANSWER!r}]
with open({ANSWER!r}) as file:
    code = compile(file.read(), {ANSWER!r}, "exec")
"""

SCRIPT = f"""{_START}
del file, site
exec(code, globals())
"""
"""The answer is the program."""

_MODULE = f"""{_START}
import json, os, types
module = types.ModuleType("answer")
sys.modules["answer"] = module
exec('''
import bisect, collections, functools, heapq, itertools, math, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
''', module.__dict__)
exec(code, module.__dict__)
"""
"""The answer is a module, with the names that answers to such tasks take for granted. It does not run as `__main__`."""

CALL = f"""{_MODULE}
given = json.load(sys.stdin)
owner = module.Solution() if hasattr(module, "Solution") else module
returned = getattr(owner, given["function"])(*given["arguments"])
plain = lambda value: value.tolist() if hasattr(value, "tolist") else list(value)
text = json.dumps(returned, default=plain).encode()
while text:
    text = text[os.write(3, text):]
"""
"""A function of the answer is called. Its result is reported; the expected result is not known here."""

STATEMENTS = f"""{_MODULE}
given = json.load(sys.stdin)
exec(compile(given["code"], "tests", "exec"), module.__dict__)
os.write(3, given["key"].encode())
"""
"""Statements are run after the answer, with its names. They are read when the answer has run to its end."""
TOLERANCE = 1e-6
"""Relative difference up to which floating-point numbers are equal; absolute below 1."""
FORMS = "inputs and outputs, assert_case, test_list, or test and entry_point"


class Case(Protocol):
    """One test case."""

    def program(self, answer: str) -> Program:
        """What is run of the code of an answer."""

    def passed(self, ended: Ended) -> bool:
        """Whether the program, which ended well, did what the case expects."""


@dataclass(frozen=True)
class Output:
    """A program reads its standard input and prints what is expected."""

    input: str
    expected: str

    def program(self, answer: str) -> Program:
        return Program(SCRIPT, self.input, {ANSWER: answer})

    def passed(self, ended: Ended) -> bool:
        return same_text(ended.output, self.expected)


@dataclass(frozen=True)
class Call:
    """A function, or a method of `class Solution`, returns what is expected."""

    function: str
    arguments: Sequence[Any]
    expected: Any

    def program(self, answer: str) -> Program:
        request = json.dumps({"function": self.function, "arguments": self.arguments})
        return Program(CALL, request, {ANSWER: answer})

    def passed(self, ended: Ended) -> bool:
        try:
            returned = json.loads(ended.report)
            return same_value(returned, self.expected) or (
                isinstance(self.expected, list) and len(self.expected) == 1 and same_value(returned, self.expected[0])
            )
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True)
class Statements:
    """Statements after the code of the answer raise nothing."""

    code: str
    prompt: str = ""
    """What an answer may continue."""
    function: str = ""
    """The function that the answer or the prompt defines; empty: the prompt is not used."""
    key: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)
    """Shows that the statements were run to their end."""

    def program(self, answer: str) -> Program:
        if self.function and f"def {self.function}" not in answer:
            answer = f"{self.prompt}{answer}"
        return Program(STATEMENTS, json.dumps({"code": self.code, "key": self.key}), {ANSWER: answer})

    def passed(self, ended: Ended) -> bool:
        return ended.report == self.key


def cases_of(ground_truth: Any) -> list[Case]:
    """The cases of a row, at least one. Raises ValueError for what is not in one of the forms."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise ValueError(f"the row's ground truth has no test cases: it is not JSON ({error})") from error
    cases = _of_mapping(truth) if isinstance(truth, Mapping) else _of_list(truth)
    if not cases:
        raise ValueError("the row's ground truth has no test cases")
    return cases


def _of_mapping(truth: Mapping[str, Any]) -> list[Case]:
    if asserts := truth.get("assert_case") or truth.get("test_list"):
        setup = "\n".join([*_texts(truth.get("test_imports")), *_texts(truth.get("test_setup_code"))])
        return [Statements(f"{setup}\n{each}") for each in asserts]
    if "test" in truth and "entry_point" in truth:
        function = str(truth["entry_point"])
        return [Statements(f"{truth['test']}\ncheck({function})", str(truth.get("prompt") or ""), function)]
    if "inputs" in truth and "outputs" in truth:
        inputs, outputs = list(truth["inputs"]), list(truth["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"the row's ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
        return [_pair(*pair, truth.get("fn_name")) for pair in zip(inputs, outputs, strict=True)]
    raise ValueError(f"the row's ground truth has none of {FORMS}; it has {', '.join(map(str, truth)) or 'nothing'}")


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in value or []]


def _of_list(truth: Any) -> list[Case]:
    if not isinstance(truth, list | tuple):
        raise ValueError(f"the row's ground truth has none of {FORMS}: it is {json.dumps(truth)[:100]}")
    cases: list[Case] = []
    for each in truth:
        if isinstance(each, str):
            cases.append(Statements(each))
        elif isinstance(each, Mapping) and "input" in each and "output" in each:
            cases.append(_pair(each["input"], each["output"], each.get("fn_name")))
        else:
            raise ValueError("a case of the row's ground truth is neither a statement nor an input with an output")
    return cases


def _pair(given: Any, expected: Any, function: str | None) -> Case:
    if not function:
        return Output(_lines(given), _lines(expected))
    if isinstance(given, str):
        arguments = [_value(line) for line in given.strip("\n").split("\n")] if given else []
    else:
        arguments = list(given) if isinstance(given, list | tuple) else [given]
    return Call(function, arguments, _value(expected) if isinstance(expected, str) else expected)


def _lines(value: Any) -> str:
    """Text, of which some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def same_text(printed: str, expected: str) -> bool:
    """Whether all lines have the same words, without empty lines at the end. A number that is expected with a point may
    differ by TOLERANCE."""
    pairs = [_words_of_lines(text) for text in (printed, expected)]
    return len(pairs[0]) == len(pairs[1]) and all(
        len(got) == len(wanted) and all(map(_same_word, got, wanted)) for got, wanted in zip(*pairs, strict=True)
    )


def _words_of_lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    if "." not in wanted:
        return False
    try:
        return _close(float(got), float(wanted))
    except ValueError:
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal, floating-point numbers up to TOLERANCE."""
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[k], expected[k]) for k in expected)
    if isinstance(expected, float) and isinstance(returned, int | float) and not isinstance(returned, bool):
        return _close(returned, expected)
    return type(returned) is type(expected) and bool(returned == expected)


def _close(got: float, wanted: float) -> bool:
    return got == wanted or math.isclose(got, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
