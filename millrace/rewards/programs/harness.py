"""What Python runs in the sandbox for each kind of test case. The code of the answer lies in a file there."""

import sysconfig

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
told = json.load(sys.stdin)
owner = module.Solution() if hasattr(module, "Solution") else module
returned = getattr(owner, told["function"])(*told["arguments"])
plain = lambda value: value.tolist() if hasattr(value, "tolist") else list(value)
text = json.dumps(returned, default=plain).encode()
while text:
    text = text[os.write(3, text):]
"""
"""A function of the answer is called. Its result is told; what is expected is not known here."""

STATEMENTS = f"""{_MODULE}
told = json.load(sys.stdin)
exec(compile(told["code"], "tests", "exec"), module.__dict__)
os.write(3, told["key"].encode())
"""
"""Statements are run after the answer, with its names. They are read when the answer has run to its end."""
