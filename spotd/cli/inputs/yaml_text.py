"""YAML as text: a document becomes tables, lists and strings, and nothing else.

Theory. A task file comes from anywhere. YAML turns `no` into a truth value, `3.10` into 3.1 and `22:30` into 1,350,
makes objects of tags, and an alias of nine others nine times over fills any memory. So nothing is resolved: every
scalar stays the text that was written, and the reader of a key knows what it should be. Aliases, tags that make objects
and keys that are written twice are refused. The events of the parser are read one by one, so that depth and number have
a bound before anything is built. PyYAML is imported here alone, and only for a YAML file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spotd.cli.inputs.options import require_extra

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES_MAX: Final = 1_000_000
VALUES_MAX: Final = 20_000
DEPTH_MAX: Final = 32
Value = str | list[Any] | dict[str, Any]
_PLAIN_TAGS: Final = "tag:yaml.org,2002:"


class YamlRefused(Exception):
    """A document that is not read, with its line and the way out."""

    def __init__(self, message: str, *, line: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.line, self.hint = message, line, hint


def read_yaml(raw: bytes) -> dict[str, Any]:
    """Return the one document of a file.

    Raises:
        YamlRefused
        CommandFailed: PyYAML is not installed.
    """
    require_extra("yaml", "yaml", "a YAML file is read with PyYAML")
    import yaml

    if len(raw) > BYTES_MAX:
        raise YamlRefused("is larger than 1 MB", hint="a task file names data, it does not hold it")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise YamlRefused("is not UTF-8 text", hint="save it as UTF-8") from exc
    try:
        found = _document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        said = " ".join(part for part in (exc.problem, exc.context) if part)
        hint = "indent by spaces" if "\\t" in said else "check the indentation and the quotes there"
        raise YamlRefused(f"is not YAML: {said}", line=None if mark is None else mark.line + 1, hint=hint) from exc
    except yaml.YAMLError as exc:
        raise YamlRefused(f"is not YAML: {exc}", hint="save it as plain UTF-8 text") from exc
    if not isinstance(found, dict):
        raise YamlRefused("holds no table of keys", hint="a task file begins with keys such as resources: and run:")
    return found


def _document(events: Iterator[Any]) -> Value | None:
    """Build the value of the only document."""
    open_values: list[list[Any] | dict[str, Any]] = []
    keys: list[str | None] = []
    result: Value | None = None
    count = documents = 0
    for event in events:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind == "DocumentStartEvent":
            documents += 1
            if documents > 1:
                hint = "submit each task as a file of its own; [after] makes one wait for another"
                raise YamlRefused("holds several documents", line=line, hint=hint)
        elif kind == "AliasEvent":
            hint = "write the value out in the place of the alias"
            raise YamlRefused(f"uses the alias *{event.anchor}, which is not read", line=line, hint=hint)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            open_values.pop()
            keys.pop()
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            count += 1
            if count > VALUES_MAX:
                raise YamlRefused(f"holds more than {VALUES_MAX:,} values", line=line, hint="shorten it")
            if event.tag is not None and not event.tag.startswith(_PLAIN_TAGS):
                raise YamlRefused(f"has the tag {event.tag}", line=line, hint="write a plain value")
            if event.tag is not None and "python" in event.tag:
                raise YamlRefused("has a tag that makes an object", line=line, hint="write a plain value")
            made: Value = _scalar(event) if kind == "ScalarEvent" else {} if kind == "MappingStartEvent" else []
            if _put(open_values, keys, made, line):
                result = made
            if not isinstance(made, str):
                if len(open_values) >= DEPTH_MAX:
                    raise YamlRefused(f"is nested deeper than {DEPTH_MAX} levels", line=line, hint="flatten it")
                open_values.append(made)
                keys.append(None)
    return result


def _scalar(event: Any) -> str:
    """Return the text of a scalar; what is written as nothing is empty."""
    is_plain = event.style is None
    return "" if is_plain and event.value in ("~", "null", "Null", "NULL") else str(event.value)


def _put(open_values: list[list[Any] | dict[str, Any]], keys: list[str | None], made: Value, line: int) -> bool:
    """Put a value where it belongs; whether it is the document itself."""
    if not open_values:
        return True
    parent = open_values[-1]
    if isinstance(parent, list):
        parent.append(made)
        return False
    key = keys[-1]
    if key is None:
        if not isinstance(made, str):
            raise YamlRefused("has a key that is no text", line=line, hint="write a name before the colon")
        if made in parent:
            raise YamlRefused(f"has the key {made} twice", line=line, hint="keep one of them")
        if made == "<<":
            raise YamlRefused("merges tables by <<, which is not read", line=line, hint="write the keys out")
        keys[-1] = made
        parent[made] = ""
        return False
    parent[key] = made
    keys[-1] = None
    return False
