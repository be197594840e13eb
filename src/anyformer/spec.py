"""Spec: a choice as frozen, validated data. No torch here, and no tensors in a spec.

A class that derives from `Spec` becomes a frozen dataclass whose fields are checked by pydantic. A class that derives
from `Part` opens a *slot*; its subclasses register in the slot under their `kind`, from inside this package or outside:

    class Norm(Part): ...                        # a slot
    class RMSNorm(Norm, kind="rms_norm"):        # a choice for it
        eps: float = 1e-6

Wherever a field has the type `Norm`, an instance, `{"kind": "rms_norm", "eps": 1e-5}` or just `"rms_norm"` will do.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import pydantic
import yaml
from pydantic_core import core_schema

__all__ = ["Part", "Spec", "SpecError", "cycle", "diff"]

T = TypeVar("T")
Path = tuple[str | int, ...]


class SpecError(ValueError):
    """A spec that cannot be: where in it, and why."""

    def __init__(self, reason: str, path: Path = ()) -> None:
        self.reason, self.path = reason, path
        super().__init__(f"{'.'.join(map(str, path))}: {reason}" if path else reason)

    def within(self, path: Path) -> SpecError:
        return type(self)(self.reason, path + self.path)


class NoSuchPlace(SpecError):
    """A path that fits nothing in a spec."""


@dataclass_transform(frozen_default=True)
class Spec:
    """Base of all specs. Subclass it with annotated fields; override `check` for rules that join several fields."""

    __no_type_check__: ClassVar[bool] = True  # a field also takes plain data, so run-time checkers leave it to pydantic

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, repr=False)(cls)

    def __post_init__(self) -> None:
        for name, adapter in _adapters(typing.cast(Any, type(self))).items():
            value = _unrolled(getattr(self, name), name)
            object.__setattr__(self, name, _validated(adapter, value, name))
        try:
            self.check()
        except SpecError:
            raise
        except ValueError as error:
            raise SpecError(str(error)) from None

    def check(self) -> None:
        """Raise ValueError if the fields do not go together."""

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.items() if value != _default(type(self), name))
        return f"{type(self).__name__}({', '.join(shown)})"

    # -- data both ways ---------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, data: Any) -> Self:
        """A spec from plain data: a mapping, the name of a kind, or a spec, which is returned as it is."""
        if isinstance(data, Part) and not data.kind:
            raise SpecError(f"{data!r} is a slot: choose one of {', '.join(sorted(data.choices()))}")
        if isinstance(data, cls):
            return data
        if isinstance(data, Spec):
            raise SpecError(f"needs {_a(cls.__name__)}, but is {data!r}")
        if isinstance(data, str) and issubclass(cls, Part):
            data = {"kind": data}
        if not isinstance(data, Mapping):
            raise SpecError(f"needs {_a(cls.__name__)} as a mapping of its fields, but is {data!r}")
        fields = {str(key): value for key, value in data.items()}
        concrete = cls._concrete(fields)
        for name in fields:
            _known(name, concrete._names(), f"field of {concrete.__name__}")
        missing = [name for name in _required(concrete) if name not in fields]
        if missing:
            raise SpecError(f"{concrete.__name__} needs `{'`, `'.join(missing)}`")
        return concrete(**fields)

    @classmethod
    def _concrete(cls, fields: dict[str, Any]) -> type[Self]:
        return cls

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in _dataclass_fields(cls)]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each field's name and value."""
        return ((name, getattr(self, name)) for name in self._names())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every field written out; a run of repeating layers becomes {"cycle": [...], "num_layers": n}."""
        return {name: _plain(value) for name, value in self.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            return cls.parse(json.loads(text))
        except json.JSONDecodeError as error:
            raise SpecError(f"is not JSON: {error}") from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        try:
            return cls.parse(yaml.load(text, _NoRepeats))
        except yaml.YAMLError as error:
            raise SpecError(
                "is not YAML: " + " ".join(str(error).replace('in "<unicode string>", ', "").split())
            ) from None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """A JSON schema (2020-12) of this spec with every kind that is registered now, for editors and validators."""
        found: dict[str, Any] = {}
        _define(cls, found)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$ref": f"#/$defs/{cls.__name__}",
            "$defs": found,
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"spec": cls.__name__}

    # -- change -----------------------------------------------------------------------------------------------------

    def aliases(self) -> dict[str, Path]:
        """Short names for deeper places, for `replace`; a block calls the op of its first branch `mixer`."""
        return {}

    def replace(self, path: str | None = None, value: Any = None, /, **fields: Any) -> Self:
        """A copy with other values: `replace(eps=1e-5)`, or `replace("decoder.*.mixer.position.base", 1e6)`.

        `*` stands for every item that has the rest of the path; a path that fits nowhere is an error that names what
        is there. `....kind` puts the named part, with its defaults, in the slot. `....num_layers` repeats the cycle of
        layers to another depth.
        """
        changed = self if path is None else _replaced(self, tuple(path.split(".")), value)
        for name in fields:
            _known(name, self._names(), f"field of {type(self).__name__}")
        return dataclasses.replace(changed, **fields)  # type: ignore[type-var]


class _NoRepeats(yaml.SafeLoader):
    """YAML in which a key may stand once in its mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise SpecError(f"line {node.start_mark.line + 1} of the YAML begins a mapping that has {twice[0]!r} twice")
        return super().construct_mapping(node, deep)


class Part(Spec):
    """A spec that fills a slot. A direct subclass is a slot; below it, classes register under their `kind`."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Part]]] = {}

    def __init_subclass__(cls, *, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if Part in cls.__bases__:
            cls.kinds = {}
        cls.kind = kind
        if kind:
            clash = cls.kinds.setdefault(kind, cls)
            if clash.__qualname__ != cls.__qualname__ or clash.__module__ != cls.__module__:
                raise SpecError(f"kind {kind!r} is taken by {clash.__module__}.{clash.__qualname__}")
            cls.kinds[kind] = cls

    @classmethod
    def choices(cls) -> dict[str, type[Part]]:
        """The registered kinds that fit here."""
        return {kind: choice for kind, choice in cls.kinds.items() if issubclass(choice, cls)}

    @classmethod
    def _concrete(cls, fields: dict[str, Any]) -> type[Self]:
        kind = fields.pop("kind", cls.kind)
        if not kind:
            raise SpecError(f"needs a `kind`; known: {', '.join(sorted(cls.choices()))}")
        _known(kind, cls.choices(), f"kind of {cls.__name__.lower()}")
        return typing.cast(type[Self], cls.choices()[kind])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().to_dict()}


def cycle(items: Sequence[T], num_layers: int) -> tuple[T, ...]:
    """Repeat `items` in order until there are `num_layers` of them: `cycle([local] * 5 + [wide], 26)`."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise SpecError(f"a cycle needs a list of layers, but has {items!r}")
    if not items or not isinstance(num_layers, int) or num_layers < 0:
        raise SpecError(f"a cycle needs at least one layer and a length >= 0, but has {len(items)} and {num_layers!r}")
    return tuple(items[i % len(items)] for i in range(num_layers))


def diff(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Where two specs differ: `[(path, value in a, value in b)]`, from the top down; `None` for "not there"."""
    if a == b:
        return []
    left, right = _children(a), _children(b)
    if type(a) is not type(b) or left is None or right is None:
        return [(path, a, b)]
    names = list(dict.fromkeys([*left, *right]))
    return [
        found
        for name in names
        for found in diff(left.get(name), right.get(name), f"{path}.{name}" if path else str(name))
    ]


# -- details ----------------------------------------------------------------------------------------------------------


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _dataclass_fields(cls: type[Spec]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(typing.cast(Any, cls))


def _default(cls: type[Spec], name: str) -> Any:
    return next(field.default for field in _dataclass_fields(cls) if field.name == name)


def _required(cls: type[Spec]) -> list[str]:
    return [field.name for field in _dataclass_fields(cls) if field.default is dataclasses.MISSING]


@functools.cache
def _adapters(cls: Any) -> dict[str, pydantic.TypeAdapter[Any]]:
    return {name: pydantic.TypeAdapter(hint) for name, hint in _hints(cls).items()}


def _hints(cls: type[Spec]) -> dict[str, Any]:
    """The types of the fields, each read where its class was written."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found |= inspect.get_annotations(base, eval_str=True)
    return {name: found[name] for name in cls._names()}


def _validated(adapter: pydantic.TypeAdapter[Any], value: Any, name: str) -> Any:
    try:
        valid = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise _explained(error, name) from None
    not_a_number = isinstance(value, bool) and not isinstance(valid, bool)
    if not_a_number or (isinstance(valid, float) and not math.isfinite(valid)):
        raise SpecError(f"must be a finite number, but is {value}", (name,))
    return valid


def _explained(error: pydantic.ValidationError, name: str) -> SpecError:
    """The first thing that is wrong, in one sentence."""
    first = error.errors()[0]
    places = (key for key in first["loc"] if isinstance(key, int))  # the words in a loc name branches of a union
    path: Path = (name, *places)
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, SpecError):
        return inner.within(path)
    said = first["msg"].removeprefix("Input should").split(", unable to")[0].strip()
    said = said.replace("a valid integer", "a whole number").replace("a valid tuple", "a list")
    return SpecError(f"must {said}, but is {reprlib.repr(first['input'])}", path)


def _known(name: str, known: Iterable[str], what: str, fault: type[SpecError] = SpecError) -> None:
    names = sorted(known)
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise fault(f"unknown {what} {name!r}; {hint}known: {', '.join(names) or 'none'}")


def _unrolled(value: Any, name: str) -> Any:
    if isinstance(value, Mapping) and set(value) == {"cycle", "num_layers"}:
        return _located(lambda: cycle(value["cycle"], value["num_layers"]), name)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        period = _period(value)
        items = [_plain(item) for item in value[:period]]
        return {"cycle": items, "num_layers": len(value)} if period < len(value) else items
    return value


def _period(items: Sequence[Any]) -> int:
    """The shortest cycle that gives `items` (specs only; other tuples are written out)."""
    if not all(isinstance(item, Spec) for item in items):
        return len(items)
    for period in range(1, len(items)):
        if all(items[i] == items[i - period] for i in range(period, len(items))):
            return period
    return len(items)


def _children(node: Any) -> dict[str, Any] | None:
    if isinstance(node, Spec):
        return dict(node.items())
    return {str(i): item for i, item in enumerate(node)} if isinstance(node, tuple) else None


def _replaced(node: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(node, tuple):
        return _replaced_items(node, str(head), rest, value)
    if not isinstance(node, Spec):
        raise NoSuchPlace(f"is {node!r} and has nothing below it, but the path goes on to {head!r}")
    if head in node.aliases():
        return _replaced(node, (*node.aliases()[str(head)], *rest), value)
    _known(str(head), [*node._names(), *node.aliases()], f"field of {type(node).__name__}", NoSuchPlace)
    if rest == ("kind",):
        return dataclasses.replace(node, **{str(head): {"kind": value}})  # type: ignore[type-var]
    changed = _located(lambda: _replaced(getattr(node, str(head)), rest, value), str(head))
    return dataclasses.replace(node, **{str(head): changed})  # type: ignore[type-var]


def _replaced_items(items: tuple[Any, ...], head: str, rest: Path, value: Any) -> tuple[Any, ...]:
    if head == "num_layers" and not rest:
        return cycle(items[: _period(items)], value)
    if head != "*":
        _known(head, [*map(str, range(len(items))), "*", "num_layers"], "item", NoSuchPlace)
        at = int(head)
        changed = _located(lambda: _replaced(items[at], rest, value), head)
        return (*items[:at], changed, *items[at + 1 :])
    results, misses = [], []
    for i, item in enumerate(items):
        try:
            results.append(_located(functools.partial(_replaced, item, rest, value), str(i)))
        except NoSuchPlace as miss:
            misses.append(miss)
            results.append(item)
    if len(misses) == len(items):
        raise misses[0] if misses else NoSuchPlace("`*` matches nothing: there are no items")
    return tuple(results)


def _located(change: Callable[[], Any], name: str) -> Any:
    try:
        return change()
    except SpecError as error:
        raise error.within((name,)) from None


def _define(cls: type[Spec], found: dict[str, Any]) -> None:
    """Put the schema of `cls`, and of all that it mentions, into `found`."""
    if cls.__name__ in found:
        return
    found[cls.__name__] = {}
    if issubclass(cls, Part) and not cls.kind:
        choices = cls.choices().values()
        short = {"enum": [choice.kind for choice in choices if not _required(choice)]}
        found[cls.__name__] = {"anyOf": [short, *({"$ref": f"#/$defs/{choice.__name__}"} for choice in choices)]}
        for choice in choices:
            _define(choice, found)
        return
    properties = {name: adapter.json_schema() for name, adapter in _adapters(typing.cast(Any, cls)).items()}
    for mentioned in (part for hint in _hints(cls).values() for part in _mentioned(hint)):
        _define(mentioned, found)
    tag = {"kind": {"const": cls.kind}} if issubclass(cls, Part) else {}
    found[cls.__name__] = {
        "type": "object",
        "description": (cls.__doc__ or "").strip().split("\n")[0],
        "properties": {**tag, **{name: _referring(schema) for name, schema in properties.items()}},
        "required": [*tag, *_required(cls)],
        "additionalProperties": False,
    }


def _mentioned(hint: Any) -> Iterator[type[Spec]]:
    if isinstance(hint, type) and issubclass(hint, Spec):
        yield hint
    for inner in typing.get_args(hint):
        yield from _mentioned(inner)


def _referring(schema: Any) -> Any:
    """pydantic's schema of a field: `{"spec": name}` becomes a reference, and a list of specs may be a cycle."""
    if isinstance(schema, dict):
        if set(schema) == {"spec"}:
            return {"$ref": f"#/$defs/{schema['spec']}"}
        plain = {key: _referring(value) for key, value in schema.items()}
        return {"anyOf": [plain, _cycle_schema(plain["items"])]} if "spec" in (schema.get("items") or {}) else plain
    return [_referring(item) for item in schema] if isinstance(schema, list) else schema


def _cycle_schema(item: Any) -> dict[str, Any]:
    """`{"cycle": [...], "num_layers": n}`, the short form of a repeating list."""
    properties = {"cycle": {"type": "array", "items": item}, "num_layers": {"type": "integer", "minimum": 0}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
