"""The shipped tools: right use, what a hostile policy hands them, and that nothing is left for the
next episode."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes import shipped
from grpo_spmd.episodes.shipped import (
    Countdown,
    PythonTool,
    SandboxDown,
    Search,
    index_of,
    match_expression,
    shipped_factory,
)
from grpo_spmd.rewards.sandbox.jail import Head
from grpo_spmd.rewards.sandbox.sandbox import Limits, SandboxError, Session


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    tool = PythonTool()
    yield tool
    tool.reset()


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    passages = [
        ("Heron", "The grey heron eats fish and frogs."),
        ("Kingfisher", "The kingfisher eats small fish, and fish again."),
        ("Café", "A café sells coffee; the naïve order tea."),
        ("Syntax", "title NEAR text AND OR NOT"),
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in passages)
    )
    return path


def test_a_name_is_there_for_the_next_call_and_gone_in_the_next_episode(python: PythonTool) -> None:
    python.reset(prompt="x", answer=3)
    assert (
        python.python("import math\nx = 20\ndef double(n): return 2 * n") == "[nothing was printed]"
    )
    assert python.python("print('x is', x)\ndouble(x) + math.floor(2.5)") == "x is 20\n42\n"
    assert python.python("class A:\n    pass\nA()").startswith("<__main__.A object")
    python.reset()
    assert python.python("x").endswith("NameError: name 'x' is not defined\n")


def test_an_error_is_shown_with_its_line_and_none_of_ours_and_state_stays(
    python: PythonTool,
) -> None:
    answer = python.python("kept = 1\nprint('before')\nkept / 0")
    assert answer.startswith("before\nTraceback (most recent call last):\n")
    assert "    kept / 0\n" in answer
    assert answer.endswith("ZeroDivisionError: division by zero\n")
    assert "jail" not in answer
    assert "SyntaxError" in python.python("def f(:")
    assert python.python("exit(3)").endswith("SystemExit: 3\n")
    assert "RecursionError" in python.python("def f(): f()\nf()")
    assert "MemoryError" in python.python("x = 'y' * (1 << 34)")
    assert python.python("kept") == "1\n"


@pytest.mark.parametrize(
    ("code", "maximum"),
    [
        ("print('y' * 5_000_000)", 8200),
        ("for _ in range(200_000): print('y')", 8200),
        ("raise ValueError('e' * 5_000_000)", 8200),
    ],
)
def test_what_is_too_long_is_cut_with_a_note(python: PythonTool, code: str, maximum: int) -> None:
    answer = python.python(code)
    assert len(answer) < maximum
    assert "characters were cut]" in answer or "characters left out]" in answer
    assert python.python("1 + 1") == "2\n"


def test_the_end_of_a_long_error_is_kept(python: PythonTool) -> None:
    assert python.python("raise ValueError('e' * 50_000 + 'the end')").endswith("eeethe end\n")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "while True: pass",
        "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_what_ends_the_interpreter_or_never_ends_says_so_and_the_next_call_has_a_new_one(
    python: PythonTool, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    python.python("gone = 1")
    with monkeypatch.context() as patched:
        patched.setattr(shipped, "_CALL_S", 0.3)
        assert python.python(code).startswith("[ended: ")
    assert "NameError" in python.python("gone")


def test_a_forged_answer_is_no_answer() -> None:
    """Code can find the connection and write on it; what does not look like an answer ends the
    interpreter."""
    forge = (
        "import socket\nfor fd in range(3, 1024):\n    try:\n"
        '        socket.socket(fileno=fd).sendall(b\'{"number": 99, "printed": 7}\\n\')\n    '
        "except OSError: pass"
    )
    session = Session(Limits(20.0, 512, "required"))
    with session:
        assert session.run("x = 1", 10.0, 100) == ""
        assert session.run(forge, 10.0, 100) is None


def test_the_tool_is_in_the_jail(python: PythonTool, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    for code in (
        f"open({str(tmp_path / 'secret')!r}).read()",
        "import socket; socket.socket()",
        "import os; os.fork()",
    ):
        assert "Error" in python.python(code)


def test_what_is_no_code_is_refused_before_it_runs(python: PythonTool) -> None:
    values: list[Any] = [None, 3, ["print(1)"], {"code": 1}]
    for value in values:
        with pytest.raises(TypeError, match="code is text"):
            python.python(value)
    with pytest.raises(ValueError, match="100,000 are the most"):
        python.python("#" * 100_001)
    assert "Error" in python.python("\ud800 = 1\x00")


def test_a_sandbox_that_fails_is_not_shown_to_the_policy_as_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no more processes")

    tool = PythonTool("none")
    monkeypatch.setattr(shipped, "Session", fails)
    with pytest.raises(SandboxDown, match="no more processes"):
        tool.python("1")
    assert not issubclass(SandboxDown, Exception)


def test_a_machine_that_cannot_shut_code_in_is_told_of_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise SandboxError("no walls here")

    monkeypatch.setattr(shipped, "check_sandbox", fails)
    with pytest.raises(ConfigError, match="the tool python: no walls here"):
        shipped_factory("python")


def test_what_is_printed_is_kept_up_to_the_limit_to_the_character() -> None:
    head = Head(5)
    assert [head.write(text) for text in ("abc", "", "defg", "h")] == [3, 0, 4, 1]
    assert (head.getvalue(), head.num_cut) == ("abcde", 3)


@pytest.mark.parametrize(
    "code", ["import sys\nsys.stdout.close()", "import sys\nwith sys.stdout as out: print('a')"]
)
def test_code_may_close_its_output(python: PythonTool, code: str) -> None:
    python.python("kept = 1")
    assert not python.python(code).startswith("[ended: ")
    assert python.python("print(2)\nkept") == "2\n1\n"


def test_search_ranks_by_bm25(corpus: Path) -> None:
    tool = Search(corpus)
    tool.reset(prompt="x")
    result = tool.search("fish", top_k=2)
    assert result.startswith("[1] Kingfisher\n")  # has the word twice in about as many
    assert "[2] Heron\n" in result
    assert "[3]" not in result
    assert tool.search("frogs heron").startswith("[1] Heron\n")
    assert tool.search("cafe naive").startswith("[1] Café\n")  # without accents too
    assert tool.search("unheard") == "[no passage has any of these words]"


WITH_FISH = (
    *(
        '""fish" OR',
        "fish*",
        "title:fish",
        "fish NEAR(frogs, 2)",
        "fish' OR 1=1 --",
        "-fish",
        "^fish",
        "{title} : fish",
    ),
    *("fish) ;drop table passages", "fish + frogs", "\x00fish\x00", "\ud800fish", "fish " * 300),
)
WITHOUT = (
    '"',
    "_",
    "NEAR",
    "e\u0301",
    "",
    " ",
    "\U0001f600",
    "fis*",
    "".join(map(chr, range(32, 127))),
    "'" * 99,
    "\ud800",
)


def test_no_query_is_syntax(corpus: Path) -> None:
    tool = Search(corpus)
    for query in (*WITH_FISH, *WITHOUT):
        assert ("] Kingfisher\n" in tool.search(query)) == (query in WITH_FISH), query
    assert tool.search("AND").startswith("[1] Syntax")  # a word like any other
    assert match_expression('a"b NOT c') == '"a" OR "b" OR "NOT" OR "c"'
    assert len(match_expression(" ".join(map(str, range(1000)))).split(" OR ")) == 32


def test_arguments_of_a_search_are_checked(corpus: Path) -> None:
    tool = Search(corpus)
    for top_k in (0, -1, 21, 10**30, True, "3", 3.0, None):
        with pytest.raises(ValueError, match="from 1 to 20"):
            tool.search("fish", top_k)  # type: ignore[arg-type]
    for query in (None, 3, ["fish"], "f" * 2001):
        with pytest.raises(ValueError, match="query is text"):
            tool.search(query)  # type: ignore[arg-type]


def test_a_search_that_takes_too_long_says_so(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write_text(
        "".join(json.dumps({"title": str(i), "text": f"word {i}"}) + "\n" for i in range(5000))
    )
    tool = Search(corpus)
    monkeypatch.setattr(shipped, "_SEARCH_S", -1.0)
    with pytest.raises(ValueError, match="use rarer words"):
        tool.search("word")


def test_an_index_is_made_once_and_again_for_another_text(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial = index_of(corpus)
    assert initial.parent.stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patched:
        patched.setattr(shipped, "_make_index", lambda *_: pytest.fail("made again"))
        assert index_of(corpus) == initial
    corpus.write_text(json.dumps({"title": "New", "text": "fish"}) + "\n")
    assert Search(corpus).search("fish") == "[1] New\nfish"
    assert not [*initial.parent.glob("*.tmp*")]
    with sqlite3.connect(initial) as connection:
        assert connection.execute("select count(*) from passages").fetchone() == (4,)


def test_an_index_that_somebody_changed_is_made_again(corpus: Path) -> None:
    index = index_of(corpus)
    whole = index.read_bytes()
    other = corpus.with_name("other.sqlite")
    with sqlite3.connect(other) as connection:
        connection.execute("create table other(x)")
    for content in (whole[:100], bytes(len(whole)), other.read_bytes()):
        index.write_bytes(content)
        assert index_of(corpus) == index
        assert "heron" in Search(corpus).search("heron")
    index.with_suffix(".note").unlink()
    changed = index.stat().st_ino
    assert index_of(corpus).stat().st_ino != changed, "nobody says that it was complete"


@pytest.mark.parametrize(
    "line",
    ["[1]", "{}", '{"text": 3}', '{"title": 3, "text": "x"}', "no json", "[" * 100_000, '"text"'],
)
def test_a_corpus_in_another_form_is_refused_by_its_line(corpus: Path, line: str) -> None:
    corpus.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl:3: a line is a JSON object"):
        Search(corpus)


def test_a_corpus_that_is_not_there_or_empty_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"cannot read the corpus .*No such file"):
        Search(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no passage"):
        Search(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError):
        Search(tmp_path)


def test_a_passage_of_any_length_or_text_is_shown_in_bounds(corpus: Path) -> None:
    corpus.write_text(
        json.dumps({"title": "t\ud800" * 3000, "text": "fish " + "x" * 100_000}) + "\n"
    )
    result = Search(corpus).search("fish")
    assert len(result) < 4200
    assert result.count("more characters were cut]") == 2


def test_countdown_is_won_by_the_first_right_submission() -> None:
    game = Countdown()
    assert "Reach 24 with the numbers 3, 8" in game.reset(nums=[3, 8], target=24, prompt="x")
    assert game.get_reward() == 0.0
    assert [game.evaluate(text) for text in ("3*8", "(8-3)/2", "-3 + 8")] == ["24", "5/2", "5"]
    assert game.submit("3*8=24") == "right"
    with pytest.raises(ValueError, match="already"):
        game.submit("3+8")
    assert game.get_reward() == 1.0
    game.reset(nums=[3, 8], target=24)
    assert game.get_reward() == 0.0
    assert game.submit("3*9") == "wrong"
    with pytest.raises(ValueError, match="already"):
        game.submit("3*8")
    assert game.get_reward() == 0.0


WRONG = (
    "24",
    "3*8*1",
    "3*8+3-3",
    "",
    "3**8",
    "__import__('os')",
    "9" * 300,
    "3/0",
    "\u0663*\u0668",
    "(" * 200 + "3*8",
)


def test_countdown_evaluates_no_code_and_cannot_be_won_by_it() -> None:
    game = Countdown()
    for text in (*WRONG, None, 24, ["3*8"]):
        game.reset(nums=[3, 8], target=24)
        if text not in WRONG[:3]:  # those are expressions
            with pytest.raises(ValueError, match=r"expression|division by zero"):
                game.evaluate(text)  # type: ignore[arg-type]
        assert game.submit(text) == "wrong"  # type: ignore[arg-type]


def test_a_row_without_a_task_is_no_episode() -> None:
    for row in (
        {},
        {"nums": [], "target": 3},
        {"nums": ["x"], "target": 3},
        {"nums": [1], "target": None},
    ):
        with pytest.raises((TypeError, ValueError)):
            Countdown().reset(**row)


def test_each_tool_has_a_schema_and_each_name_a_factory(corpus: Path) -> None:
    expected = {
        "python": {"python"},
        "countdown": {"evaluate", "submit"},
        f"search:{corpus}": {"search"},
    }
    for name, tools in expected.items():
        factory = shipped_factory(name)
        assert factory is not None
        environment = factory()
        for tool in tools:
            schema = transformers.utils.get_json_schema(getattr(environment, tool))
            assert all(
                item["description"]
                for item in schema["function"]["parameters"]["properties"].values()
            )
        public = {item for item in vars(type(environment)) if not item.startswith("_")}
        assert public - {"reset", "get_reward"} == tools  # as TRL finds them
    assert shipped_factory("search.py:Engine") is None
    assert shipped_factory("my.py:Class") is None
    with pytest.raises(ConfigError, match="search:CORPUS"):
        shipped_factory("search")
