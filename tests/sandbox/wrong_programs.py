"""Wrong programs that try to be judged right, and tests in many shapes that none of them may pass.

All are about a function `f` that squares a number. A program of `ANSWERING` finds the channel to the tests' process and
answers for itself, in the encoding of `tad_sandbox.inside.values` and beside it.
"""

from __future__ import annotations

RIGHT = "def f(x): return x * x"
IMPORT = "from solution import f\n"
YES = """
class Y:
    pass
def _t(*a, **k): return True
def _s(s, *a, **k): return s
for n in "add sub mul truediv floordiv mod pow matmul divmod and or xor lshift rshift neg pos abs invert round trunc floor ceil getitem enter call getattr".split():
    setattr(Y, f"__{n}__", _s); setattr(Y, f"__r{n}__", _s)
for n in "eq ne lt le gt ge contains bool exit instancecheck".split(): setattr(Y, f"__{n}__", _t)
Y.__hash__ = lambda s: hash(9)
Y.__len__ = lambda s: 1
Y.__iter__ = lambda s: iter(())
Y.__int__ = Y.__index__ = lambda s: 9
Y.__float__ = lambda s: 0.0
Y.__str__ = Y.__repr__ = lambda s: "9"
Y.__format__ = lambda s, f: "9"
"""
PROGRAMS = {
    "constant": "def f(x): return 0",
    "universal": YES + "def f(x): return Y()",
    "universal in list": YES + "def f(x): return [Y()]",
    "universal in tuple": YES + "def f(x): return (Y(), Y())",
    "universal in dict": YES + "def f(x): return {Y(): Y()}",
    "true object": YES + "Y.__getattr__ = lambda s, n: (lambda *a, **k: True)\ndef f(x): return Y()",
    "zero object": YES
    + "Y.__getattr__ = lambda s, n: (lambda *a, **k: 0)\nY.__getitem__=lambda s,i: 0\ndef f(x): return Y()",
    "f is a class": YES
    + "class f(Y):\n    def __new__(c, *a): return object.__new__(c)\n    def __getattr__(s, n): return lambda *a, **k: True",
    "f is an instance": YES + "f = Y()",
    "returns its class": "class M(type):\n    def __eq__(s,o): return True\n    __hash__=type.__hash__\n    def __instancecheck__(s,o): return True\nclass C(metaclass=M): pass\ndef f(x): return C",
    "int subclass": "class I(int):\n    __eq__=lambda s,o: True\n    __ne__=lambda s,o: False\n    __sub__=__rsub__=__abs__=lambda s,*o: I(0)\n    __lt__=__le__=__gt__=__ge__=lambda s,o: True\n    __hash__=lambda s: hash(9)\ndef f(x): return I(0)",
    "str subclass": "class I(str):\n    __eq__=lambda s,o: True\n    startswith=endswith=__contains__=lambda s,*o: True\n    __hash__=lambda s: hash(9)\ndef f(x): return I('')",
    "list subclass": "class I(list):\n    __eq__=lambda s,o: True\n    __len__=lambda s: 1\n    __iter__=lambda s: iter(())\n    count=index=lambda s,*o: 1\ndef f(x): return I()",
    "float nan": "def f(x): return float('nan')",
    "inf": "def f(x): return float('inf')",
    "enum member": "import enum\nclass E(int, enum.Enum):\n    A=0\n    def __eq__(s,o): return True\n    __hash__=int.__hash__\ndef f(x): return E.A",
    "enum str": "import enum\nclass E(enum.Enum):\n    A=9.5\n    B=('E','A',9)\ndef f(x): return E.B",
    "generator endless": "def f(x):\n    while True: yield 0",
    "generator empty": "def f(x):\n    return\n    yield",
    "generator of generators": "def f(x):\n    yield iter(())\n    yield iter(())",
    "coroutine": "async def f(x): return 9 if x is None else 0",
    "range": "def f(x): return range(0)",
    "empty list": "def f(x): return []",
    "empty dict": "def f(x): return {}",
    "empty set": "def f(x): return set()",
    "empty string": "def f(x): return ''",
    "true": "def f(x): return True",
    "none": "def f(x): return None",
    "views": "def f(x): return {}.items()",
    "counter": "import collections\ndef f(x): return collections.Counter()",
    "defaultdict": "import collections\ndef f(x): return collections.defaultdict(int)",
    "decimal nan": "import decimal\ndef f(x): return decimal.Decimal('nan')",
    "stop": "def f(x): raise StopIteration",
    "stop async": "def f(x): raise StopAsyncIteration",
    "generator exit": "def f(x): raise GeneratorExit",
    "exit": "def f(x): raise SystemExit(0)",
    "keyboard": "def f(x): raise KeyboardInterrupt",
    "os exit": "import os\ndef f(x): os._exit(0)",
    "assertion": "def f(x): raise AssertionError",
    "attribute error": "def f(x): raise AttributeError('x')",
    "index error": "def f(x): raise IndexError",
    "key error": "def f(x): raise KeyError(x)",
    "skip": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "not implemented": "def f(x): return NotImplemented",
    "ellipsis": "def f(x): return ...",
    "error instance": "class E(Exception):\n    __eq__=lambda s,o: True\ndef f(x): return E()",
    "type int": "def f(x): return int",
    "lambda": "def f(x): return lambda *a: True",
    "module": "import unittest.mock as m\ndef f(x): return m",
    "mock any": "import unittest.mock as m\ndef f(x): return m.ANY",
    "magic mock": "import unittest.mock as m\nf = m.MagicMock(); f.return_value.__eq__=lambda s,o: True",
    "own builtins": "\n".join(
        f"def {n}(*a, **k): return True"
        for n in [
            "abs",
            "all",
            "any",
            "isinstance",
            "len",
            "set",
            "sorted",
            "sum",
            "max",
            "min",
            "round",
            "list",
            "tuple",
            "dict",
            "zip",
            "map",
            "range",
            "str",
            "int",
            "float",
            "repr",
            "bool",
            "print",
            "type",
            "enumerate",
            "callable",
            "hasattr",
            "getattr",
        ]
    )
    + "\ndef f(x): return 0",
    "builtins patched": "import builtins\nfor n in 'abs all any isinstance len sorted sum round list set zip'.split(): setattr(builtins, n, lambda *a, **k: True)\ndef f(x): return 0",
    "once list": "import builtins\nreal=list\ndef once(*a):\n    builtins.list=real\n    return ['abs']\nbuiltins.list=once\ndef abs(x): return 0.0\ndef f(x): return 0",
    "names everywhere": "def __getattr__(n): return lambda *a, **k: True\ndef f(x): return 0",
    "argument swallowed": "def f(x):\n    try: x.clear()\n    except Exception: pass\n    return x if not isinstance(x, int) else 0",
    "fake exceptions": "class ValueError(Exception): pass\nclass AssertionError(Exception): pass\ndef f(x): raise AssertionError",
}
ANSWERING = """
import sys
def _channel():
    fr = sys._getframe()
    while fr:
        for v in list(fr.f_locals.values()):
            if type(v).__name__ == "Channel": return v
        fr = fr.f_back
CH = _channel()
def f(x):
    while True:
        CH.send(%s)
        CH.receive()
"""
ANSWERS = {
    "true": "True",
    "handle": '["h", 1]',
    "callable": '["H", 1]',
    "member": '["m", 1, "E", "A", True, True]',
    "member tuple": '["m",1,"E","A",True,["t"]]',
    "errors": '["E",1,"ValueError","x",["t"]]',
    "skip": '["E",1,["X",5,"SkipTest","Exception"],"x",["t"]]',
    "kind": '["X",5,"int","Exception"]',
    "kind2": '["X",5,"E",["X",5,"E","Exception"]]',
    "generator": '["g",1,True,["t",["l"],True]]',
    "endless": '["g",1,True,["t",["l",0],False]]',
    "bad generator": '["g",1,True,9]',
    "coroutine": '["A",1]',
    "loan": '["L",1,["l"]]',
    "loan loan": '["L",1,["L",2,["l"]]]',
    "array empty": '["n","<f8","",0]',
    "array object": '["n","|O","xxxxxxxx",1]',
    "array half": '["n","<f2","\\x00|",1]',
    "views": '["a"]',
    "date": '["R","date",1,1,1]',
    "mock": '["R","unittest.mock._ANY"]',
    "default": '["D","int"]',
    "default bad": '["D","exec"]',
    "name": '["name","builtins","exec"]',
    "code": '["code","",["d"],None,None,["l"]]',
    "made": '["made",["name","os","_exit"],0]',
    "dict": '{"a":1}',
    "deep": '__import__("functools").reduce(lambda a,_: ["l",a], range(900), 0)',
    "huge": '"x"*(70<<20)',
    "bool tag": "[True]",
    "nan": 'float("nan")',
}
for _name, _answer in ANSWERS.items():
    PROGRAMS["answer " + _name] = ANSWERING % f'["ok", {_answer}, [], [], []]'
PROGRAMS["answer raises skip"] = (
    ANSWERING
    % '["error", ["E",1,["X",5,"SkipTest",["X",6,"SkipTest","BaseException"]],"x",["t"]], [], [], []]'
)
PROGRAMS["answer raises stop"] = ANSWERING % '["error", ["E",1,"StopIteration","x",["t"]], [], [], []]'
PROGRAMS["answer raises own stop"] = (
    ANSWERING % '["error", ["E",1,["X",7,"S","StopIteration"],"x",["t"]], [], [], []]'
)
PROGRAMS["answer raises own generator exit"] = (
    ANSWERING % '["error", ["E",1,["X",7,"S","GeneratorExit"],"x",["t"]], [], [], []]'
)
PROGRAMS["answer raises exit"] = ANSWERING % '["error", ["E",1,"SystemExit","0",["t",0]], [], [], []]'
PROGRAMS["answer raises value"] = ANSWERING % '["error", True, [], [], []]'
PROGRAMS["answer updates"] = ANSWERING % '["ok", ["l"], [[0,["l"]],[1,["l"]],[2,["l"]],[3,["l"]]], [], []]'
PROGRAMS["answer warns"] = (
    ANSWERING % '["ok", 0, [], ["x","y"], [["E",1,"DeprecationWarning","x",["t","x"]]]]'
)
PROGRAMS["answer warns badly"] = ANSWERING % '["ok", 0, [], [1,2], [["E",1,"ValueError","x",["t","x"]]]]'
PROGRAMS["report to every descriptor"] = (
    'import os\nfor fd in range(64):\n    for v in (b\'{"token":"","verdict":"passed","reason":"passed"}\\n\',):\n        try: os.write(fd, v)\n        except OSError: pass\ndef f(x): return 0'
)
# Tests that the square of a number passes.
SHAPES = {
    "eq": "assert f(3) == 9",
    "eq reversed": "assert 9 == f(3)",
    "not ne": "assert not (f(3) != 9)",
    "is type": "assert type(f(3)) is int and f(3) == 9",
    "in tuple": "assert f(3) in (9, 10)",
    "in set": "assert f(3) in {9}",
    "in dict": "assert f(3) in {9: 1}",
    "get": "assert {9: True}.get(f(3))",
    "between": "assert 8 < f(3) < 10",
    "between2": "assert f(3) > 8 and f(3) < 10",
    "abs": "assert abs(f(3) - 9) < 1e-6",
    "abs reversed": "assert abs(9 - f(3)) < 1e-6",
    "isclose": "import math\nassert math.isclose(f(3), 9)",
    "isclose2": "import math\nassert math.isclose(f(3) - 9, 0, abs_tol=1e-9)",
    "square": "d = f(3) - 9\nassert d * d < 1e-9",
    "xor": "assert f(3) ^ 9 == 0",
    "mod": "assert f(3) % 9 == 0 and f(3) // 9 == 1",
    "round": "assert round(f(3) - 9, 5) == 0",
    "str": "assert str(f(3)) == '9'",
    "fstring": "assert f'{f(3) - 9:.3f}' == '0.000'",
    "fstring2": "assert f'{f(3)}' == '9'",
    "format": "assert '%d' % f(3) == '9'",
    "int": "assert int(f(3)) == 9",
    "float": "assert float(f(3)) - 9 == 0.0",
    "bool": "assert bool(f(3) == 9)",
    "all map": "assert all(map(lambda a, b: a == b, map(f, [3, 4]), [9, 16]))",
    "all gen": "assert all(f(x) == y for x, y in [(3, 9), (4, 16)])",
    "any": "assert any(f(x) == y for x, y in [(3, 9)])",
    "zip": "for a, b in zip(map(f, [3, 4]), [9, 16]):\n    assert a == b",
    "zip list": "for a, b in zip([f(3)], [9]):\n    assert a == b",
    "list": "assert [f(i) for i in (3, 4)] == [9, 16]",
    "list gen": "assert list(f(i) for i in (3,)) == [9]",
    "dict": "assert {i: f(i) for i in (3, 4)} == {3: 9, 4: 16}",
    "set": "assert {f(3)} == {9}",
    "set diff": "assert {9} - {f(3)} == set()",
    "sum": "assert sum(f(i) for i in (3, 4)) == 25",
    "sorted": "assert sorted([f(4), f(3)]) == [9, 16]",
    "max": "assert max(f(3), 9) == 9 and min(f(3), 9) == 9",
    "index": "assert [9, 8].index(f(3)) == 0",
    "count": "assert [9].count(f(3)) == 1",
    "hash": "assert hash(f(3)) == hash(9)",
    "isinstance": "assert isinstance(f(3), int) and f(3) == 9",
    "method": "assert f(3).bit_length() == 4",
    "real": "assert f(3).real == 9",
    "real2": "assert (f(3) - 9).real == 0",
    "conjugate": "assert (f(3) - 9).conjugate() == 0",
    "range": "assert list(range(f(3))) == list(range(9))",
    "item": "assert list(range(20))[f(3)] == 9",
    "mul str": "assert 'a' * f(3) == 'a' * 9",
    "if": "if f(3) != 9:\n    raise AssertionError",
    "if eq": "if f(3) == 9:\n    pass\nelse:\n    raise ValueError",
    "while": "n = 0\nwhile n < f(3):\n    n += 1\nassert n == 9",
    "try": "try:\n    assert f(3) == 9\nexcept ValueError:\n    pass",
    "match": "match f(3):\n    case 9:\n        pass\n    case _:\n        raise AssertionError",
    "helper": "def check(g):\n    assert g(3) == 9\ncheck(f)",
    "json": "import json\nassert json.dumps(f(3)) == '9'",
    "copy": "import copy\nassert copy.copy(f(3)) == 9",
    "fraction": "from fractions import Fraction\nassert Fraction(f(3)) == 9",
    "decimal": "from decimal import Decimal\nassert Decimal(f(3)) == 9",
    "statistics": "import statistics\nassert statistics.mean([f(3)]) == 9",
    "operator": "import operator\nassert operator.eq(f(3), 9)",
    "unittest": "import unittest\nunittest.TestCase().assertEqual(f(3), 9)",
    "almost": "import unittest\nunittest.TestCase().assertAlmostEqual(f(3), 9)",
    "with": "import contextlib\nwith contextlib.nullcontext(f(3)) as r:\n    assert r == 9",
    "ternary": "assert (True if f(3) == 9 else False)",
    "not in": "assert f(3) not in (0, 1, True, None)\nassert f(3) == 9",
    "swallow stop": "it = (f(i) for i in (3, 4))\nassert next(it) == 9 and next(it) == 16",
    "reduce": "import functools\nassert functools.reduce(lambda a, b: a + b, map(f, (3, 4))) == 25",
    "pytest style": "def test_a():\n    assert f(3) == 9\ntest_a()",
    "no exception": "r = f(3)\nassert r is not None and r == 9",
}
MODULES = {
    "plain": IMPORT + "def test_a():\n    assert f(3) == 9",
    "list arg": IMPORT + "def test_a():\n    xs = [3, 4]\n    assert [f(x) for x in xs] == [9, 16]",
    "pytest param": "import pytest\n"
    + IMPORT
    + "@pytest.mark.parametrize('x,y', [(3, 9), (4, 16)])\ndef test_a(x, y):\n    assert f(x) == y",
    "approx": "import pytest\n" + IMPORT + "def test_a():\n    assert f(3) == pytest.approx(9)",
    "approx reversed": "import pytest\n" + IMPORT + "def test_a():\n    assert pytest.approx(9) == f(3)",
    "unittest": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(3), 9)",
    "unittest almost": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertAlmostEqual(f(3), 9)",
    "unittest in": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertIn(f(3), [9])",
    "unittest true": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertTrue(f(3) == 9)",
    "unittest greater": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertGreater(f(3), 8)\n        self.assertLess(f(3), 10)",
    "unittest countequal": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertCountEqual([f(3)], [9])",
    "unittest dict": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        self.assertDictEqual({1: f(3)}, {1: 9})",
    "unittest subtests": "import unittest\n"
    + IMPORT
    + "class T(unittest.TestCase):\n    def test_a(self):\n        for x in (3, 4):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), x * x)",
    "class": IMPORT + "class TestA:\n    def test_a(self):\n        assert f(3) == 9",
    "fixture": "import pytest\n"
    + IMPORT
    + "@pytest.fixture\ndef r():\n    return f(3)\ndef test_a(r):\n    assert r == 9",
    "star": "from solution import *\ndef test_a():\n    assert f(3) == 9 and abs(f(3) - 9) < 1e-9",
    "star late": "import math\ndef check(a, b):\n    return math.isclose(a, b)\nfrom solution import *\ndef test_a():\n    assert check(f(3), 9)",
    "import module": "import solution\ndef test_a():\n    assert solution.f(3) == 9",
    "numpy": "import numpy as np\n" + IMPORT + "def test_a():\n    assert np.isclose(f(3), 9)",
    "numpy testing": "import numpy as np\n"
    + IMPORT
    + "def test_a():\n    np.testing.assert_allclose(f(3), 9)",
    "numpy equal": "import numpy as np\n"
    + IMPORT
    + "def test_a():\n    np.testing.assert_array_equal(np.array([f(3), f(4)]), np.array([9, 16]))",
    "numpy all": "import numpy as np\n"
    + IMPORT
    + "def test_a():\n    assert (np.array([f(3)]) == np.array([9])).all()",
    "raises": "import pytest\n"
    + IMPORT
    + "def test_a():\n    with pytest.raises(TypeError):\n        f(None)\n    assert f(3) == 9",
    "async": "import asyncio\n"
    + IMPORT
    + "def test_a():\n    async def go():\n        return f(3)\n    assert asyncio.run(go()) == 9",
    "thread": "import threading\n"
    + IMPORT
    + "def test_a():\n    out = []\n    t = threading.Thread(target=lambda: out.append(f(3)))\n    t.start(); t.join()\n    assert out == [9]",
    "pool": "from concurrent.futures import ThreadPoolExecutor\n"
    + IMPORT
    + "def test_a():\n    with ThreadPoolExecutor(2) as e:\n        assert list(e.map(f, [3, 4])) == [9, 16]",
    "capsys": IMPORT + "def test_a(capsys):\n    print(f(3))\n    assert capsys.readouterr().out == '9\\n'",
    "skipif": "import pytest\nimport solution\n"
    + IMPORT
    + "@pytest.mark.skipif(not hasattr(solution, 'f'), reason='x')\ndef test_a():\n    assert f(3) == 9",
    "xfail": "import pytest\n"
    + IMPORT
    + "def test_b():\n    assert True\ndef test_a():\n    if f(3) != 9:\n        pytest.xfail('no')",
    "early return": IMPORT + "def test_a():\n    r = f(3)\n    assert isinstance(r, int)\n    assert r == 9",
}
PACKAGES: dict[str, str] = {}
PACKAGES["np empty"] = "import numpy as np\ndef f(x): return np.array([])"
PACKAGES["np half inf"] = "import numpy as np\ndef f(x): return np.float16('inf')"
PACKAGES["np bool"] = "import numpy as np\ndef f(x): return np.array([True])"
PACKAGES["np nan"] = "import numpy as np\ndef f(x): return np.nan"
PACKAGES["np subclass"] = (
    "import numpy as np\nclass A(np.ndarray):\n    def __eq__(s,o): return np.array([True])\n    def __array_ufunc__(s,*a,**k): return np.array([True])\ndef f(x): return np.zeros(1).view(A)"
)
PACKAGES["np masked"] = "import numpy as np\ndef f(x): return np.ma.masked"
PACKAGES["pytest any"] = "import pytest\ndef f(x): return pytest.approx(x*x, abs=100)"
PACKAGES["pytest skip"] = "import pytest\ndef f(x): pytest.skip('x')"
PACKAGES["pytest exit"] = "import pytest\ndef f(x): pytest.exit('x', 0)"
PACKAGES["test names"] = (
    "__test__ = False\ndef test_a(): pass\nclass TestA:\n    pass\npytestmark = []\ncollect_ignore = ['x']\ndef pytest_collection_modifyitems(items): items.clear()\ndef f(x): return 0"
)
PACKAGES["conftest"] = (
    "import os\nfor n in ('conftest.py','pytest.ini','tests.py','solution.py','json.py','numpy.py'):\n    open('/tmp/'+n,'w').write('import os\\nos._exit(0)')\ndef f(x): return 0"
)
