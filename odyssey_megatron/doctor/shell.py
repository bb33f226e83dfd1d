"""The commands of a shell script, read without running any of them.

It understands as much of the shell as launch scripts use: variables, arrays, quotes, comments, continued lines, whole
numbers that are worked out, here-documents, and branches. A branch is left out if its condition is known not to hold.
All others are read; where these give a variable different values, the last one counts, and :attr:`Script.others` has
the rest.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

NOT_RUN = "$(...)"
"""Stands for what a command would print."""
_MARK = "$NOT_RUN"
"""The same, as one word of a shell."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING = re.compile(r"export|local|declare|readonly|typeset|-\w+")
_VARIABLE = re.compile(r"\$(?:(\w+|@)|\{(\w+|@)(?:\[[@*]\])?(?::?([-=])([^{}]*))?\}|\{\?([^{}]*)\})")
_COMMENT = r"(?<!\S)#.*"
_QUOTES = r"\\.|'[^']*'|\"(?:\\[\s\S]|[^\"\\])*\""
_DOCUMENT = r"<<(-?)[ \t]*(['\"]?)(\w+)\2(.*\n)((?:.*\n)*?)\1?[ \t]*\3[ \t]*$"
_FIRST = re.compile(f"{_DOCUMENT}|{_QUOTES}|({_COMMENT})", re.MULTILINE)
"""What is told apart before words are: whichever begins first hides the others within it."""
_TRUTH = re.compile(r"(?<![^\s;&|])\(\(((?:[^()]|\([^()]*\))*)\)\)")
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|['\"]", re.DOTALL)
_SEPARATORS = re.compile(r"&&|\|\||;;|.", re.DOTALL)
_PUNCTUATION = ";&|<>()\n"
_HIDDEN = {ord(one): 0xE000 + ord(one) for one in _PUNCTUATION + " \t'\"$`{}#\\"}
_SHOWN = {hidden: shown for shown, hidden in _HIDDEN.items()}
_OPENING = frozenset(("then", "else", "do", "done", "{", "}", "!", "time"))
_COMMAND = re.compile(r"-[a-z]*c")
"""Behind it a shell expects a command as one word."""
_MOST_WORDS = 100_000
"""Limit for a line in which variables are replaced: one may stand for others many times over."""
_MOST_SOURCED = 100
_MOST_NESTED = 4
"""A default may have one of its own."""
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_WORKED_OUT: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: lambda one, other: int(one / other) if abs(one) < 2**52 else one // other,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@dataclass(slots=True)
class _Branches:
    """An ``if``, a ``case`` or a loop, as far as it has been read."""

    subject: str | None = None
    """What a ``case`` compares with its patterns; None: it is no ``case``."""
    asked: list[str] | None = field(default_factory=list)
    """The words of a condition or pattern that is being read; None: the commands of a branch are."""
    holds: bool | None = None
    """Whether the branch is taken; None: not known."""
    taken: bool = False
    """Whether a branch before is taken for certain."""
    doubted: bool = False
    """Whether a branch before may be taken."""

    def enter(self, holds: bool | None) -> None:
        """Begin the next branch, which is taken if ``holds`` and none before is."""
        self.asked = None
        self.holds = False if self.taken or holds is False else None if self.doubted else holds
        self.taken, self.doubted = self.taken or holds is True, self.doubted or holds is None


class Script:
    """What is known of a script's variables; :meth:`commands` reads more of it."""

    def __init__(self, variables: dict[str, list[str]], sourced: Callable[[str], str | None]):
        """Take what is known when it starts.

        Args:
            variables: those that are set; ``@`` has the script's arguments.
            sourced: the text of a file by its path, which may begin with what is not known; None: there is none.
        """
        self.variables = variables
        self._sourced = sourced
        self._num_sourced = 0
        self.others: dict[str, list[str]] = {}
        """Variable -> the values that it may have as well, since branches give it different ones."""
        self._from: dict[str, set[str]] = {}
        # What is open: branches, and the array that is being filled.
        self._open: list[_Branches] = []
        self._array: tuple[str, list[str]] | None = None

    def commands(self, text: str) -> Iterator[list[str]]:
        """Yield the commands as lists of words, with variables not yet replaced. Raises ValueError."""
        command: list[str] = []
        does: bool | None = True
        for word in [*_words(text), "\n"]:
            if self._array is not None:
                self._fill(word)
            elif self._open and self._open[-1].asked is not None:
                self._ask(word)
            elif word == "(" and command and command[-1].endswith("=") and ASSIGNMENT.fullmatch(command[-1]):
                self._array = command.pop(), []
            elif _SEPARATORS.fullmatch(word) and set(word) <= set(_PUNCTUATION):
                if does is False or not self._reads():
                    self._leave_out(command)
                else:
                    self._carry_out(command, is_sure=does is True)
                    yield command
                    yield from self._read_from(command)
                does = self._does_next(does, command, word)
                if word == ";;" and self._open and self._open[-1].subject is not None:
                    self._open[-1].asked = []
                command = []
            elif command or not self._is_keyword(word):
                command.append(word)

    def _read_from(self, command: Sequence[str]) -> Iterator[list[str]]:
        """Yield the commands of a file that ``command`` reads into the script, if it is one that does."""
        if len(command) < 2 or command[0] not in ("source", "."):
            return
        self._num_sourced += 1
        if self._num_sourced > _MOST_SOURCED:
            raise ValueError(f"more than {_MOST_SOURCED} files are sourced")
        text = self._sourced(self._replaced(command[1]))
        if text is not None:
            opened, self._open = self._open, [_Branches(asked=None, holds=None if self._doubts() else True)]
            yield from self.commands(text)
            self._open = opened

    def _doubts(self) -> bool:
        return any(one.holds is None for one in self._open)

    def _does_next(self, does: bool | None, command: Sequence[str], separator: str) -> bool | None:
        """Return whether the command behind ``separator`` is run; None: that is not known."""
        if separator not in ("&&", "||") or not command:
            return True
        if does is False:
            return separator == "||"
        held = self._holds(command)
        return held if held is None or separator == "&&" else not held

    def choices(self, words: Sequence[str]) -> dict[str, list[str]]:
        """Return the values of those variables that ``words`` depend on and branches give several, the one that counts
        first. What is not known anyway is left out.
        """
        found = {}
        for name in sorted(set[str]().union(*map(self._uses, words))):
            counts, *others = (
                " ".join(one.split()) for one in (" ".join(self.variables[name]), *self.others.get(name, ()))
            )
            if "$" not in counts and (others := [one for one in dict.fromkeys(others) if one != counts]):
                found[name] = [counts, *others]
        return found

    def expanded(self, words: Sequence[str]) -> Iterator[str]:
        """Yield ``words`` with variables replaced. A variable that is a whole word gives all words of its value."""
        for count, word in enumerate(words):
            alone = None if count and _COMMAND.fullmatch(words[count - 1]) else _VARIABLE.fullmatch(word)
            values = self._value(alone[1] or alone[2] or "") if alone else None
            if values is None:
                parts = [self._replaced(word)]
            else:
                # Quotes are not seen here. A variable that holds a list of flags is taken to be unquoted.
                parts = _split(values[0]) if len(values) == 1 and "--" in values[0] else values
            if count + len(parts) > _MOST_WORDS:
                raise ValueError(f"a line has more than {_MOST_WORDS:,} words")
            yield from parts

    def _reads(self) -> bool:
        return all(one.holds is not False for one in self._open)

    def _is_keyword(self, word: str) -> bool:
        """Begin or end what ``word`` does, if it is a word of the shell's own."""
        if word in ("if", "case"):
            self._open.append(_Branches(subject="" if word == "case" else None))
        elif word in ("while", "until", "for"):
            self._open.append(_Branches(asked=None, doubted=True))  # it may not run even once
            return word != "for"
        elif word in ("fi", "esac", "done"):
            del self._open[-1:]
        elif word == "elif" and self._open:
            self._open[-1].asked = []
        elif word == "else" and self._open:
            self._open[-1].enter(True)
        else:
            return word in _OPENING
        return True

    def _ask(self, word: str) -> None:
        """Take a word of a condition, or of the patterns of a ``case``; the last one begins a branch."""
        this = self._open[-1]
        assert this.asked is not None
        if this.subject is None:
            if word == "then":
                this.enter(self._condition(this.asked))
            elif word not in "\n;":
                this.asked.append(word)
        elif not this.subject:
            if word == "in":
                this.subject, this.asked = self._replaced(" ".join(this.asked)) or " ", []
            else:
                this.asked.append(word)
        elif word == ")":
            patterns = [self._replaced(one) for one in this.asked]
            known = not any("$" in one for one in (this.subject, *patterns))
            this.enter(any(fnmatchcase(this.subject, one) for one in patterns) if known else None)
        elif word == "esac":
            self._open.pop()
        elif not set(word) <= set(_PUNCTUATION):
            this.asked.append(word)

    def _condition(self, words: Sequence[str]) -> bool | None:
        """Return whether all conditions between ``&&``, or any between ``||``, hold; None: that is not known."""
        if {"&&", "||"} <= {*words}:
            return None  # which of them counts first differs within [[ ]] and outside
        decides = "||" in words
        one, found = list[str](), list[bool | None]()
        for word in [*words, "&&"]:
            if word in ("&&", "||"):
                is_within = "[[" in one and one[-1] != "]]"
                if is_within and one[0] != "[[":
                    return None  # all that is in it is negated
                found.append(self._holds([*one, "]]"] if is_within else one))
                one = ["[["] if is_within else []
            else:
                one.append(word)
        return decides if decides in found else None if None in found else not decides

    def _holds(self, command: Sequence[str]) -> bool | None:
        """Return whether a test succeeds; None: that is not known, or it is no test."""
        words = [self._replaced(word) for word in command]
        if words[:1] == ["!"]:
            inner = self._holds(words[1:])
            return None if inner is None else not inner
        if not words or words[0] not in ("[", "[[", "test"):
            known = words[:1] in (["true"], ["false"]) or bool(words and ASSIGNMENT.fullmatch(words[0]))
            return words[0] != "false" if known else None
        if any("$" in word for word in words):
            return None
        return _compared(words[1:] if words[0] == "test" else words[1:-1])

    def _carry_out(self, command: Sequence[str], *, is_sure: bool) -> None:
        """Do what a command does to the variables."""
        if command[:1] == ["shift"] and "@" in self.variables:
            count = "".join(command[1:2]) or "1"
            self.variables["@"] = self.variables["@"][int(count) if count.isdigit() else 0 :]
        elif command[:1] == [":"]:
            for word in command:
                self._replaced(word)
        elif command[:1] == ["for"] and command[2:3] == ["in"]:
            for item in self.expanded(command[3:]):
                self._put(command[1], [item], [])
        for word in command:
            assigned = ASSIGNMENT.fullmatch(word)
            if assigned:
                name, more, value = assigned.groups()
                before = self.variables.get(name, []) if more else []
                new = before + ([self._replaced(value)] if value else [])
                self._put(name, new, [value, f"${name}" * bool(more)], is_sure=is_sure)
            elif not _DECLARING.fullmatch(word):
                return

    def _leave_out(self, command: Sequence[str]) -> None:
        """Note that a variable is empty if only a branch that is not taken would set it."""
        for word in command:
            if assigned := ASSIGNMENT.fullmatch(word):
                self.variables.setdefault(assigned[1], [])

    def _fill(self, word: str) -> None:
        """Take a word of an array; the last one sets the variable."""
        assert self._array is not None
        assigned, words = self._array
        if word == ")":
            self._array = None
            name = assigned.rstrip("+=")
            before = self.variables.get(name, []) if assigned.endswith("+=") else []
            if not self._reads():
                self.variables.setdefault(name, [])
            else:
                self._put(name, before + list(self.expanded(words)), [*words, f"${name}" * bool(before)])
        elif not set(word) <= set(_PUNCTUATION):
            words.append(word)

    def _put(self, name: str, value: list[str], of: Sequence[str], *, is_sure: bool = True) -> None:
        """Set a variable. In a branch that may not be taken it may also keep what it has."""
        before = self.variables.get(name)
        uses = set[str]().union(*map(self._uses, of)) - {name}
        if is_sure and not self._doubts():
            self.others.pop(name, None)
        elif before is not None:
            old, new = (" ".join(one).strip() for one in (before, value))
            is_more = not old or new.startswith(f"{old} ") or new.endswith(f" {old}")
            has_flags = is_more and "--" in new.replace(old, "", 1)
            if not new or ("$" in new and "$" not in old and not has_flags):
                return  # nothing, or a value that is not known, says less than what there is
            uses |= self._from.get(name, set())
            if old and old != new and not is_more and old not in self.others.get(name, []):
                self.others.setdefault(name, []).append(old)
        self.variables[name], self._from[name] = value, uses

    def _uses(self, text: str) -> set[str]:
        found = set[str]()
        for one in _VARIABLE.finditer(text):
            names = (
                [one[1] or one[2]]
                if one[5] is None
                else re.findall(r"[A-Za-z_]\w*", one[5].translate(_SHOWN))
            )
            for name in names:
                found |= self._from.get(name, set()) | ({name} & self.others.keys())
        return found

    def _value(self, name: str) -> list[str] | None:
        if name.isdigit() and "@" in self.variables:
            return self.variables["@"][int(name) - 1 : int(name)]
        return self.variables.get(name)

    def _replaced(self, word: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found[5] is not None:
                return self._worked_out(found[5].translate(_SHOWN))
            name, default = found[1] or found[2], found[4]
            known = self._value(name)
            if known is not None and (known or default is None):
                return " ".join(known)
            if found[3] == "=":
                self._put(name, [default], [])
            return default if default is not None else found[0]

        for _ in range(_MOST_NESTED):
            replaced = _VARIABLE.sub(value, word)
            if len(replaced) > 10 * _MOST_WORDS:
                raise ValueError("a variable's value is too long")
            if replaced == word or "${" not in replaced:
                break
            word = replaced
        return replaced

    def _worked_out(self, text: str) -> str:
        """Return the number that ``$((text))`` is; the same text, if that is not known."""
        known = re.sub(r"(?<![\w$])[A-Za-z_]\w*", r"$\g<0>", self._replaced(text))
        known = self._replaced(known).replace("&&", " and ").replace("||", " or ")
        try:
            return str(int(_number(ast.parse(known.strip(), mode="eval").body)))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
            return f"$(({''.join(text.split()).replace(_MARK, NOT_RUN)}))"


def _number(node: ast.expr) -> int:
    """Return the value of whole numbers, their sums, products and comparisons. Raises ValueError."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BoolOp(op=op, values=values):
            return int((all if isinstance(op, ast.And) else any)([_number(one) for one in values]))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            if type(op) in _WORKED_OUT:
                return int(_WORKED_OUT[type(op)](_number(left), _number(right)))
    raise ValueError


def _compared(words: Sequence[str]) -> bool | None:
    match words:
        case ["-z" | "-n" as how, word]:
            return bool(word) == (how == "-n")
        case ["-n"]:
            return False
        case ["-z"]:
            return True
        case [one, "=" | "==" | "!=" as how, other]:
            return fnmatchcase(one, other) == (how != "!=")
        case [one, how, other] if how in _COMPARED and all(
            word.lstrip("-").isdigit() for word in (one, other)
        ):
            return _COMPARED[how](int(one), int(other))
        case ["!", *rest]:
            inner = _compared(rest)
            return None if inner is None else not inner
    return None


def _plain(found: re.Match[str]) -> str:
    """Return nothing for a comment, which ends with its line whatever its last character is, and a here-document as one
    word, before what stands behind it on its line.
    """
    if found[3]:
        return f" {shlex.quote(found[5])} {re.sub(_COMMENT, '', found[4])}"
    return "" if found[6] else found[0]


def _words(text: str) -> Iterator[str]:
    text = _FIRST.sub(_plain, text.replace("\r\n", "\n"))
    if opened := next((one for one in _QUOTED.finditer(text) if one[0] in "'\""), None):
        line = text.count("\n", 0, opened.start()) + 1
        raise ValueError(f"the quote {opened[0]} in line {line} is not closed")
    text = _without_commands(_TRUTH.sub(r"[ $((\1)) -ne 0 ]", text.replace("\\\n", " ")))
    found = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    found.whitespace, found.whitespace_split, found.commenters = " \t\r", True, ""
    for word in found:
        if word and set(word) <= set(_PUNCTUATION):
            yield from _SEPARATORS.findall(word)
        else:
            yield word.replace(_MARK, NOT_RUN)


def _split(text: str) -> list[str]:
    """Return the words of a variable's value, without the quotes that ``eval`` would take away."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _without_commands(text: str) -> str:
    """Replace ``$(...)`` and backquotes, as what they would print is not known, and hide ``$((...))`` from the shell's
    rules for words.
    """
    kept, depth, start = [], 0, 0
    for found in re.finditer(r"\$\(|[()]", text):
        if depth:
            depth += -1 if found[0] == ")" else 1
            if not depth:
                inner = text[start : found.end()]
                is_number = inner.startswith("$((") and inner.endswith("))")
                number = _without_commands(inner[3:-2].replace("$((", "((")).translate(_HIDDEN)
                kept.append("${?" + number + "}" if is_number else _MARK)
                start = found.end()
        elif found[0] == "$(":
            kept.append(text[start : found.start()])
            start, depth = found.start(), 1
    return re.sub(r"`[^`]*`", _MARK, "".join(kept) + ("" if depth else text[start:]))
