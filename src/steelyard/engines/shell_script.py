"""Commands of a shell script with the values of its variables, found without running anything.

Read are assignments of text, arrays and calculations, defaults of parameters, the numbers in lines for Slurm,
here-documents, and the branches of ``if``, ``case``, ``while`` and ``&&`` whose conditions compare known values. A
condition is open if it asks for files, for the output of a command, or for a variable that the script does not set;
then each of its branches may be taken. Functions are read where they stand, and other files are not.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

_NAME = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?!$-])")
_PARAMETER = re.compile(r"\$\{(\w+)(\[[@*]\])?(?:(:?[-=+?])(.*)|(,,|\^\^))?\}", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REDIRECTED = re.compile(r"\d*(?:<<<|<<-?|>>|<&|>&|<|>)|&>>?")
_SEPARATED = re.compile(r"\n|;;&?|;|&&|\|\||\|&?|&|\(|\)")
_KEYWORDS = (
    *("if", "then", "elif", "else", "fi", "case", "esac", "for", "while", "until", "do", "done"),
    *("!", "{", "}", "time", "exec"),
)
_SLURM = re.compile(r"(?m)^#SBATCH\s+--(nodes|gpus-per-node|ntasks-per-node)[= ](\d{1,6})\b")
_OF_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
_ASSIGNS = ("export", "declare", "local", "readonly", "typeset")
_DEEPEST, _LONGEST = 30, 1_000_000
"""Limits of nested quotes, beyond which text stays as it is, and of the length of a value."""
_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge},
}
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_Truth = bool | None
"""None if a condition is open."""


def _and(one: _Truth, other: _Truth) -> _Truth:
    return False if False in (one, other) else None if None in (one, other) else True


def _not(one: _Truth) -> _Truth:
    return None if one is None else not one


def _end(text: str, at: int, depth: int = 0) -> int:
    """Return the end of the quoted text, substitution, parenthesis or single character that begins at a place."""
    two = text[at : at + 2]
    if two[0] == "\\":
        return min(at + 2, len(text))
    if two[0] == "'":
        return max(text.find("'", at + 1), at) + 1
    closing = "}" if two == "${" else ")" if two == "$(" or two[0] == "(" else two[0] if two[0] in '"`' else ""
    if not closing or depth == _DEEPEST:
        name = _NAME.match(text, at)
        return name.end() if name else at + 1
    at += 2 if two in ("${", "$(") else 1
    while at < len(text):
        if text[at] == closing:
            return at + 1
        if closing == ")" and text[at] == "#" and text[at - 1].isspace():
            at = _line_end(text, at)
        is_nested = text[at : at + 1] in ("\\", '"', "`", "$") or (closing in "})" and text[at : at + 1] in ("'", "("))
        at = _end(text, at, depth + 1) if is_nested else at + 1
    return len(text)


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _statements(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each simple command as they are written, with the operator after them."""
    at, words, redirected = 0, list[str](), ""
    documents: list[str] = []
    while at < len(text):
        start, two = at, text[at : at + 2]
        if two[0] in " \t\r" or two == "\\\n":
            at += 1 if two[0] != "\\" else 2
        elif two[0] == "#":
            at = _line_end(text, at)
        elif two in ("((", "[[") and (end := text.find("))" if two == "((" else "]]", at)) > 0:
            at = end + 2
            words.append(text[start:at])
        elif found := _REDIRECTED.match(text, at):
            at, redirected = found.end(), found[0]
        elif found := _SEPARATED.match(text, at):
            at = found.end()
            while found[0] == "\n" and documents:
                mark = documents.pop(0)
                line = re.compile(rf"^\t*{re.escape(mark.strip(chr(39) + chr(34)))}$", re.MULTILINE).search(text, at)
                body, at = text[at : line.start() if line else len(text)], line.end() if line else len(text)
                is_plain = mark[0] in "'\""
                words.append("'" + body.replace("'", " ") + "'" if is_plain else '"' + body.replace('"', " ") + '"')
            yield words, found[0]
            words = []
        else:
            while at < len(text) and (text[at] not in " \t\r\n;&|<>()" or (text[at] == "(" and text[at - 1] == "=")):
                at = _end(text, at)
            word = text[start:at]
            documents += [word] if redirected in ("<<", "<<-") else []
            words += [] if redirected else [word]
            redirected = ""
    yield words, "\n"


@dataclass(slots=True)
class _Branch:
    """The branch of a conditional command that is being read."""

    seen: _Truth = False
    """Whether an earlier branch is taken."""
    is_taken: _Truth = None
    asks: bool = True
    """Whether its condition is being read."""
    subject: str | None = None
    """Text that the patterns of a ``case`` are compared with."""

    def begin(self, condition: _Truth) -> None:
        self.asks, self.is_taken = False, _and(condition, _not(self.seen))
        self.seen = self.seen or (None if condition is None else condition or self.seen)

    def begin_case(self, patterns: Sequence[str]) -> None:
        assert self.subject is not None, "of a case"
        is_open = "$" in self.subject and "*" not in patterns
        self.begin(None if is_open else any(fnmatchcase(self.subject, each) for each in patterns))


@dataclass(slots=True)
class ShellScript:
    """Texts of the commands of a script, and of its assignments with options, with values in place of variables."""

    commands: list[str] = field(default_factory=list)
    assigned: list[str] = field(default_factory=list)
    conditional: list[str] = field(default_factory=list)
    """Texts that count only under an open condition."""
    values: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """Variables whose value depends on an open condition."""
    branches: list[_Branch] = field(default_factory=list)
    status: _Truth = True
    """Result of the last command."""

    @classmethod
    def read(cls, text: str) -> "ShellScript":
        """Return what a script's text says."""
        found, before, patterns = cls(), "\n", list[str]()
        for option, value in _SLURM.findall(text):
            found.values |= dict.fromkeys(_OF_SLURM[option], value)
        for written, after in _statements(text):
            words, is_negated, is_first = found._without_keywords(written)
            last = found.branches[-1] if found.branches else None
            if last and last.asks and last.subject is not None:
                patterns += [found.filled(each) for each in words]
                if after == ")":
                    last.begin_case(patterns)
                    patterns = []
            elif words:
                found._follow(words, "\n" if is_first else before, is_negated=is_negated)
            if last and last.subject is not None and after.startswith(";;"):
                last.asks = True
            before = after if written or after != "\n" else before
        return found

    def _without_keywords(self, written: list[str]) -> tuple[list[str], bool, bool]:
        """Return a command after the keywords before it, whether its result is negated, and whether a keyword came."""
        words, is_negated = written, False
        while words and words[0] in _KEYWORDS:
            word, last = words[0], self.branches[-1] if self.branches else None
            if last and last.asks and last.subject is not None and word != "esac":
                break  # a pattern
            if word in ("if", "while", "until", "for"):
                self.branches.append(_Branch())
            elif word == "case":
                self.branches.append(_Branch(subject=self.filled(" ".join(words[1:2]))))
                words = words[2:]
            elif word in ("fi", "done", "esac") and last:
                self.branches.pop()
            elif word in ("then", "do", "else") and last:
                last.begin(True if word == "else" else self.status)
            elif word == "elif" and last:
                last.asks, last.is_taken = True, None
            is_negated ^= word == "!"
            if word == "for":
                self.open |= {*words[1:2]}
                self.status, words = True, words[:1]
            words = words[1:]
        return words, is_negated, len(words) < len(written) and written[0] not in ("!", "{", "time", "exec")

    def _follow(self, words: Sequence[str], before: str, *, is_negated: bool) -> None:
        """Note a command that follows another one after an operator, and its result."""
        runs = self.status if before == "&&" else _not(self.status) if before == "||" else True
        for branch in self.branches:
            runs = _and(runs, branch.is_taken)
        result = self._result(words, runs, asks=bool(self.branches) and self.branches[-1].asks)
        result = _not(result) if is_negated else result
        if before == "||":
            result = _not(_and(_not(self.status), _not(result)))
        self.status = _and(self.status, result) if before == "&&" else result

    def _result(self, words: Sequence[str], runs: _Truth, *, asks: bool) -> _Truth:
        """Return the result of a command, after what it assigns is noted. Those that are no tests are taken to
        succeed, outside a condition."""
        first = words[0]
        if runs is False and not asks:
            return None
        if first in ("[", "test") or first.startswith("[["):
            inner = words[1:] if not first.startswith("[[") else self._parts(first[2:-2])
            return self._tested([self.filled(each) for each in inner if each != "]"])
        if first.startswith("(("):
            value = self._calculated(first[2:-2])
            return None if value is None else bool(value)
        given = [each for each in words[1:] if each[0] not in "-+"] if first in _ASSIGNS else words
        assigned = [match for each in given if (match := _ASSIGNED.fullmatch(each))]
        if len(assigned) == len(given):
            for match in assigned:
                self._assign(match[1], match[3], runs, appends=bool(match[2]))
            return True
        text = " ".join(self.filled(each) for each in words if not _ASSIGNED.fullmatch(each))
        self.commands.append(text)
        self.conditional += [text] if runs is None and not asks else []
        return None if asks else True

    @staticmethod
    def _parts(text: str) -> list[str]:
        return [part for words, after in _statements(text) for part in (*words, after) if part != "\n"]

    def _assign(self, name: str, written: str, runs: _Truth, *, appends: bool) -> None:
        is_array = written.startswith("(")
        parts = [each for words, _ in _statements(written[1:-1]) for each in words] if is_array else [written]
        old, new = self.values.get(name), " ".join(self.filled(each) for each in parts)
        if appends:
            new = f"{old or ''}{' ' * is_array}{new}"
        has_options = "--" in f"{old} {new}"
        if runs is None:
            self.conditional += [new.replace(old, " ", 1) if old else new]
        if runs is None and old is not None and old != new:
            if not has_options:
                self.open.add(name)
                return
            new = new if old in new else old if new in old else f"{old} {new}"
        self.open -= {name} if runs else set()
        self.values[name] = new
        self.assigned += [new] if has_options else []

    def filled(self, text: str, *, is_quoted: bool = False) -> str:
        """Return text without quotes, and with values in place of variables; those without one stay as ``$NAME``.

        Single quotes are text if ``is_quoted``. Raises `ValueError` for more than a million characters.
        """
        found, at, length = list[str](), 0, 0
        while at < len(text):
            start, at = at, at + 1 if is_quoted and text[at] == "'" else _end(text, at)
            part = text[start:at]
            if part[0] == "\\":
                part = part[1:].replace("\n", " ")
            elif part[0] in "'\"" and len(part) > 1:
                part = part[1:-1] if part[0] == "'" else self.filled(part[1:-1], is_quoted=True)
            elif part.startswith("$((") and part.endswith("))"):
                value = self._calculated(part[3:-2])
                part = re.sub(r"\s", "", part) if value is None else str(int(value))
            elif part.startswith("$(") or (part[0] == "`" and len(part) > 1):
                part = "$(...)"
            elif part[0] == "$" and len(part) > 1:
                part = self._parameter(part)
            found.append(part)
            length += len(part)
            if length > _LONGEST:
                raise ValueError(f"a value of more than {_LONGEST:,} characters")
        return "".join(found)

    def _parameter(self, written: str) -> str:
        if written == "$#":
            return "0"
        match = _PARAMETER.fullmatch(written)
        name = match[1] if match else written[1:]
        value = None if name in self.open or (written[1] == "{" and not match) else self.values.get(name)
        if match and match[3] and name not in self.open:
            if match[3][-1] == "+":
                return self.filled(match[4]) if value else ""
            if match[3][-1] in "-=" and not value:
                value = self.filled(match[4])
                if match[3][-1] == "=":
                    self.values[name] = value
        if match and match[5] and value is not None:
            value = value.lower() if match[5] == ",," else value.upper()
        return f"${name}" if value is None else value

    def _tested(self, parts: Sequence[str]) -> _Truth:
        """Return the result of a test."""
        for word, is_or in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if word in parts:
                at = parts.index(word)
                one, other = self._tested(parts[:at]), self._tested(parts[at + 1 :])
                return _not(_and(_not(one), _not(other))) if is_or else _and(one, other)
        if parts and parts[0] == "!":
            return _not(self._tested(parts[1:]))
        if len(parts) == 2 and parts[0] in ("-z", "-n"):
            is_unset = bool(_NAME.fullmatch(parts[1])) and parts[1][1:] not in self.open
            is_empty = None if "$" in parts[1] and not is_unset else is_unset or not parts[1]
            return _not(is_empty) if parts[0] == "-n" else is_empty
        if len(parts) != 3 or "$" in parts[0] + parts[2]:
            return None
        if parts[1] in ("=", "==", "!="):
            return fnmatchcase(parts[0], parts[2]) == (parts[1] != "!=")
        value = self._calculated(parts[0] + _COMPARED.get(parts[1], parts[1]) + parts[2])
        return None if value is None else bool(value)

    def _calculated(self, written: str) -> int | None:
        """Return the value of an integer expression; None if it has another form or needs an unknown value."""
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.values.get(name[0], name[0]), self.filled(written))
        if chosen := re.fullmatch(r"([^?:]*)\?([^?:]*):([^?:]*)", text):
            condition = self._calculated(chosen[1])
            return None if condition is None else self._calculated(chosen[2] if condition else chosen[3])
        if len(text) > 200 or not re.fullmatch(r"[\d\s+*/%()<>=!&|-]+", text):
            return None
        code = text.replace("/", "//").replace("&&", " and ").replace("||", " or ").strip()
        try:
            return _value(ast.parse(code, mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return None


def _value(node: ast.expr) -> int:
    """Return the value of a calculation of integers. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BoolOp):
        return int((all if isinstance(node.op, ast.And) else any)(_value(each) for each in node.values))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
        return int(_OPERATIONS[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    raise ValueError("not a calculation of integers")
