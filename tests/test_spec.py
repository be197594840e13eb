"""Specs: data both ways, errors that name the place and the way out, `replace`, `diff`, JSON schema."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import anyformer as af

LOCAL = af.Attention(4, num_kv_heads=2, pattern=af.Causal() & af.Window(8), position=af.Rotary(base=1e4))
WIDE = LOCAL.replace(pattern=af.Causal(), position=af.Rotary(base=1e6, frequencies=af.YaRN(4.0, original_len=64)))


def layer(mixer: af.Mixer, *more: af.Op) -> af.Block:
    return af.Block.pre(mixer, *more, af.GatedFFN(16), norm=af.RMSNorm(eps=1e-5))


def gpt() -> af.TransformerSpec:
    blocks = af.cycle([layer(LOCAL)] * 2 + [layer(WIDE)], 8)
    return af.TransformerSpec(dim=8, vocab_size=10, decoder=blocks, final_norm=af.RMSNorm())


def bert() -> af.TransformerSpec:
    ops = af.Attention(2, pattern=af.Full(), bias=("q", "k", "v", "out")), af.DenseFFN(16, "gelu")
    embed = af.Embed(position=af.Learned(32), token_types=2, norm=af.LayerNorm(eps=1e-12), dropout=0.1)
    block = af.Block.post(*ops, norm=af.LayerNorm(eps=1e-12), dropout=0.1)
    return af.TransformerSpec(dim=8, vocab_size=10, embed=embed, encoder=(block,) * 3, head=af.LMHead(bias=True))


def t5() -> af.TransformerSpec:
    expert = af.MoE(af.GatedFFN(16), 4, shared=af.DenseFFN(4))
    encoder = layer(af.Attention(2, pattern=af.Full(), scale=1.0, position=af.RelativeBias(bidirectional=True)))
    decoder = af.Block.pre(
        af.Attention(2, pattern=~af.Window(2) & af.Causal() | af.Prefix(0) & af.Causal(), position=af.RelativeBias()),
        af.CrossAttention(2),
        expert,
        norm=af.RMSNorm(),
    )
    return af.TransformerSpec(dim=8, vocab_size=10, encoder=(encoder,) * 2, decoder=(decoder, layer(LOCAL)), head=None)


FAMILIES = pytest.mark.parametrize("make", [gpt, bert, t5])


# -- data both ways ---------------------------------------------------------------------------------------------------


@FAMILIES
def test_round_trip(make) -> None:
    spec = make()
    assert af.TransformerSpec.from_yaml(spec.to_yaml()) == spec
    assert af.TransformerSpec.from_json(spec.to_json()) == spec
    assert af.TransformerSpec.parse(spec.to_dict()) == spec
    assert json.loads(json.dumps(spec.to_dict())) == spec.to_dict(), "plain data only"


def test_repeating_layers_are_written_once() -> None:
    data = gpt().to_dict()["decoder"]
    assert data["num_layers"] == 8
    assert len(data["cycle"]) == 3
    assert gpt().to_yaml().count("gated_ffn") == 3


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_cycles_of_any_length_round_trip(num_layers: int, period: int) -> None:
    mixers = [layer(LOCAL.replace(num_kv_heads=n)) for n in (1, 2, 4)]
    spec = gpt().replace(decoder=af.cycle(mixers[:period], num_layers))
    assert [b.mixer.num_kv_heads for b in spec.decoder] == [(1, 2, 4)[i % period] for i in range(num_layers)]
    assert af.TransformerSpec.from_yaml(spec.to_yaml()) == spec


def test_defaults_may_be_left_out_and_kinds_written_short() -> None:
    text = """
    dim: 8
    vocab_size: 10
    decoder:
      cycle:
        - branches:
            - {op: {kind: attention, num_heads: 2, position: rotary}, pre: rms_norm}
            - {op: {kind: gated_ffn, hidden: 16}, pre: {kind: rms_norm, eps: 1e-5}}
      num_layers: 2
    """
    spec = af.TransformerSpec.from_yaml(text)
    branches = (
        af.Branch(af.Attention(2, position=af.Rotary()), pre=af.RMSNorm()),
        af.Branch(af.GatedFFN(16), pre=af.RMSNorm(eps=1e-5)),
    )
    assert spec == af.TransformerSpec(dim=8, vocab_size=10, decoder=(af.Block(branches),) * 2)


def test_every_kind_is_known_in_a_fresh_process() -> None:
    """A spec may be read before any class that it names was touched."""
    text = (
        "import anyformer as af, sys\n"
        "spec = af.TransformerSpec.from_yaml(sys.stdin.read())\n"
        "print(spec.decoder[0].branches[2].op.kind)"
    )
    done = subprocess.run([sys.executable, "-c", text], input=t5().to_yaml(), capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("moe", "")


def test_specs_need_no_torch() -> None:
    code = "import anyformer.spec, sys; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- values -----------------------------------------------------------------------------------------------------------


@FAMILIES
def test_equal_specs_are_one_key(make) -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({make(), make(), make().replace(vocab_size=11)}) == 2


def test_a_spec_is_not_equal_to_its_like_of_another_kind() -> None:
    assert af.DenseFFN(8, "silu", False) != af.GatedFFN(8, "silu", False)
    assert af.Attention(2, pattern=af.Full()) != af.CrossAttention(2)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpt().dim = 9  # type: ignore[misc]


def test_positional_arguments() -> None:
    assert af.Attention(4, 2, 16) == af.Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    assert af.GatedFFN(8, "gelu") == af.GatedFFN(hidden=8, activation="gelu")
    assert af.Linear(4.0, 16) == af.Linear(factor=4.0, original_len=16)


def test_repr_shows_what_is_not_default_and_can_be_read_back() -> None:
    assert repr(af.RMSNorm()) == "RMSNorm()"
    assert repr(af.Attention(4, pattern=af.Full())) == "Attention(num_heads=4, pattern=Full())"
    assert eval(repr(gpt()), vars(af) | {name: getattr(af, name) for name in af.__all__}) == gpt()


# -- errors -----------------------------------------------------------------------------------------------------------


def with_op(op: Any) -> dict[str, Any]:
    return {"dim": 8, "vocab_size": 4, "decoder": [{"branches": [{"op": op}]}]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            with_op({"kind": "atention", "num_heads": 2}),
            "unknown kind of op 'atention'; did you mean 'attention'? known: ",
        ),
        (with_op({"kind": "zzz"}), "unknown kind of op 'zzz'; known: attention, cross_attention, dense_ffn, gated_ffn"),
        (
            with_op({"kind": "attention", "num_head": 2}),
            "unknown field of Attention 'num_head'; did you mean 'num_heads'? known: bias, dropout, head_dim",
        ),
        (with_op({"kind": "attention"}), "Attention needs `num_heads`"),
        (with_op({"num_heads": 2}), "needs a `kind`; known: attention, "),
        (with_op("rms_norm"), "unknown kind of op 'rms_norm'; known: "),
        (with_op(3), "needs an Op as a mapping of its fields, but is 3"),
        (with_op(af.RMSNorm()), "needs an Op, but is RMSNorm()"),
    ],
)
def test_what_is_wrong_and_where(data: dict[str, Any], said: str) -> None:
    with pytest.raises(af.SpecError) as error:
        af.TransformerSpec.parse(data)
    assert str(error.value).startswith(f"decoder.0.branches.0.op: {said}")
    assert error.value.path == ("decoder", 0, "branches", 0, "op")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gpt().replace(dim="8x"), "dim: "),
        (lambda: gpt().replace(dim=8.5), "dim: "),
        (lambda: gpt().replace(dim=0), "dim: must be greater than 0, but is 0"),
        (lambda: gpt().replace(dim=None), "dim: must be a whole number, but is None"),
        (lambda: gpt().replace(decoder=layer(LOCAL)), "decoder: "),
        (lambda: gpt().replace(decoder=(LOCAL,)), "decoder.0: needs a Block, but is Attention(num_heads=4, "),
        (lambda: af.Attention(4, bias=("q", "o")), "bias.1: must be 'q', 'k', 'v' or 'out', but is 'o'"),
        (lambda: af.Attention(4, bias=True), "bias: "),
        (
            lambda: af.Attention(4, position={"kind": "rotary", "frequencies": "yarn"}),
            "position.frequencies: YaRN needs",
        ),
        (lambda: af.And(()), "And needs at least one pattern"),
        (lambda: af.Attention(4, position=af.Position()), "position: "),
    ],
)
def test_wrong_types_name_the_path(make, said: str) -> None:
    with pytest.raises(af.SpecError) as error:
        make()
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_unknown_names_in_python_are_pythons_error() -> None:
    with pytest.raises(TypeError, match="heads"):
        af.Attention(4, heads=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (af.TransformerSpec.from_yaml, "a: [1", "is not YAML: "),
        (af.TransformerSpec.from_yaml, "- 1", "needs a TransformerSpec as a mapping of its fields, but is [1]"),
        (af.TransformerSpec.from_yaml, "", "needs a TransformerSpec as a mapping of its fields, but is None"),
        (af.TransformerSpec.from_json, "{", "is not JSON: "),
        (af.RMSNorm.from_yaml, "kind: layer_norm", "unknown kind"),
        (af.Norm.from_yaml, "kind: 3", "unknown kind of norm 3; known: layer_norm, rms_norm"),
    ],
)
def test_text_that_is_no_spec(parse, text: str, said: str) -> None:
    with pytest.raises(af.SpecError) as error:
        parse(text)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("repeated", [{"cycle": 5, "num_layers": 2}, {"cycle": [], "num_layers": 2}])
def test_a_cycle_that_is_none(repeated: dict[str, Any]) -> None:
    with pytest.raises(af.SpecError, match=r"^decoder: "):
        af.TransformerSpec.parse({"dim": 8, "vocab_size": 4, "decoder": repeated})


@pytest.mark.parametrize("num_layers", ["six", None, 2.5, -1])
def test_a_cycle_of_no_number(num_layers: Any) -> None:
    with pytest.raises(af.SpecError):
        af.cycle([layer(LOCAL)], num_layers)
    with pytest.raises(af.SpecError, match=r"^decoder: "):
        gpt().replace("decoder.num_layers", num_layers)
    with pytest.raises(af.SpecError, match=r"^decoder: "):
        af.TransformerSpec.parse(
            {"dim": 8, "vocab_size": 4, "decoder": {"cycle": [layer(LOCAL).to_dict()], "num_layers": num_layers}}
        )


# -- replace ----------------------------------------------------------------------------------------------------------


def test_replace_by_keyword_keeps_the_rest() -> None:
    spec = gpt()
    assert spec.replace(vocab_size=20).vocab_size == 20
    assert spec.replace(vocab_size=20).replace(vocab_size=10) == spec
    assert spec.vocab_size == 10


def test_replace_in_every_layer() -> None:
    changed = gpt().replace("decoder.*.mixer.position.base", 5.0)
    assert [block.mixer.position.base for block in changed.decoder] == [5.0] * 8
    assert isinstance(changed.decoder[2].mixer.position.frequencies, af.YaRN)
    assert changed.replace("decoder.*.mixer.position.base", 1e4).replace("decoder.2.mixer.position.base", 1e6) != gpt()


def test_replace_in_one_layer() -> None:
    changed = gpt().replace("decoder.3.ffn.hidden", 32)
    assert [block.branches[1].op.hidden for block in changed.decoder] == [16] * 3 + [32] + [16] * 4


def test_star_takes_the_items_that_have_the_rest_of_the_path() -> None:
    spec = t5().replace("decoder.*.cross.num_heads", 4)
    assert spec.decoder[0].branches[1].op == af.CrossAttention(4)
    assert spec.decoder[1] == t5().decoder[1]
    both = gpt().replace("decoder.*.branches.*.pre.eps", 0.5)
    assert {branch.pre.eps for block in both.decoder for branch in block.branches} == {0.5}


def test_replace_num_layers_repeats_the_cycle() -> None:
    deeper = gpt().replace("decoder.num_layers", 12)
    assert deeper.decoder == af.cycle(gpt().decoder[:3], 12)
    assert gpt().replace("decoder.num_layers", 2).decoder == gpt().decoder[:2]


def test_replace_kind_puts_defaults_in_the_slot() -> None:
    assert gpt().replace("decoder.*.mixer.position.kind", "alibi").decoder[0].mixer.position == af.Alibi()
    assert gpt().replace("final_norm.kind", "layer_norm").final_norm == af.LayerNorm()
    assert gpt().replace("head", None).replace("head.kind", "lm").head == af.LMHead()


def test_replace_takes_what_a_field_takes() -> None:
    assert gpt().replace("final_norm", {"kind": "layer_norm", "eps": 0.1}).final_norm == af.LayerNorm(eps=0.1)
    assert gpt().replace("final_norm", "layer_norm").final_norm == af.LayerNorm()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "decoder.*.mixr.position",
            None,
            "decoder.0: unknown field of Block 'mixr'; did you mean 'mixer'? known: branches, ",
        ),
        ("decoder.9.mixer", None, "decoder: unknown item '9'; known: *, 0, 1, "),
        ("dim.x", 3, "dim: is 8 and has nothing below it, but the path goes on to 'x'"),
        ("decoder.*.ffn.hiden", 3, "unknown field of GatedFFN 'hiden'; did you mean 'hidden'?"),
        ("encoder.*.mixer", None, "encoder: `*` matches nothing: there are no items"),
        ("decoder.*.mixer.num_heads", "x", "num_heads: "),
        ("decoder.*.mixer.num_heads", 3, "`num_heads` must be a multiple of `num_kv_heads` (2), but is 3"),
        ("decoder.*.mixer.position.kind", "rotory", "unknown kind of position 'rotory'; did you mean 'rotary'?"),
        ("decoder.*.ffn.kind", "dense_ffn", "DenseFFN needs `hidden`"),
        ("decoder.num_layers", -1, "decoder: "),
        ("", 3, "unknown field of TransformerSpec ''"),
    ],
)
def test_replace_says_what_does_not_fit(path: str, value: Any, said: str) -> None:
    with pytest.raises(af.SpecError) as error:
        gpt().replace(path, value)
    assert said in str(error.value)


def test_replace_unknown_keyword() -> None:
    with pytest.raises(af.SpecError, match="unknown field of TransformerSpec 'dmi'; did you mean 'dim'"):
        gpt().replace(dmi=3)


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_names_the_places_from_the_top_down() -> None:
    a, b = gpt(), gpt().replace(vocab_size=11).replace("decoder.1.mixer.position.base", 2.0)
    assert af.diff(a, a) == []
    assert af.diff(a, b) == [("vocab_size", 10, 11), ("decoder.1.branches.0.op.position.base", 1e4, 2.0)]
    shorter = a.replace("decoder.num_layers", 7)
    assert af.diff(a, shorter) == [("decoder.7", a.decoder[7], None)]
    assert af.diff(shorter, a) == [("decoder.7", None, a.decoder[7])]


def test_diff_of_another_kind_is_the_whole_part() -> None:
    a = gpt()
    assert af.diff(a, a.replace(final_norm=None)) == [("final_norm", af.RMSNorm(), None)]
    assert af.diff(a, a.replace("final_norm.kind", "layer_norm")) == [("final_norm", af.RMSNorm(), af.LayerNorm())]


# -- JSON schema ------------------------------------------------------------------------------------------------------

CHECKS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def faults(schema: dict[str, Any], value: Any, root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where `value` breaks `schema`: as much of JSON schema as ours use; a keyword that it does not know raises."""
    known = {"$ref", "anyOf", "const", "enum", "type", "properties", "required", "additionalProperties", "items"}
    known |= {"minimum", "exclusiveMinimum", "maximum", "prefixItems"}
    silent = {"$schema", "$defs", "description", "title", "default", "uniqueItems"}
    assert set(schema) <= known | silent, set(schema) - known - silent
    if "$ref" in schema:
        yield from faults(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root, path)
    if "anyOf" in schema and all(list(faults(choice, value, root, path)) for choice in schema["anyOf"]):
        yield f"{path}: none of anyOf"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not in {schema['enum']}"
    if "type" in schema and (
        not isinstance(value, CHECKS[schema["type"]]) or (schema["type"] != "boolean" and isinstance(value, bool))
    ):
        yield f"{path}: not of type {schema['type']}"
        return
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{path}: too small"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: too small"
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{path}: lacks {name}" for name in schema.get("required", []) if name not in value)
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from faults(schema["properties"][name], inner, root, f"{path}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{path}: {name} is too much"
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from faults(schema["items"], item, root, f"{path}.{i}")


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for inner in node.values():
            yield from references(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from references(inner)


@pytest.mark.parametrize(
    "spec", [af.TransformerSpec, af.Block, af.Op, af.Position, af.RMSNorm], ids=lambda c: c.__name__
)
def test_every_reference_of_a_schema_resolves(spec: type[af.Spec]) -> None:
    schema = spec.json_schema()
    json.dumps(schema)
    found = set(references(schema))
    assert found
    assert {ref.removeprefix("#/$defs/") for ref in found} <= set(schema["$defs"])
    assert all(definition for definition in schema["$defs"].values())


@FAMILIES
def test_specs_fit_the_schema(make) -> None:
    schema = af.TransformerSpec.json_schema()
    assert list(faults(schema, json.loads(make().to_json()), schema)) == []


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (with_op({"kind": "attention"}), ".decoder"),
        (with_op({"kind": "attention", "num_heads": 0}), ".decoder"),
        (with_op({"kind": "attention", "num_heads": 2, "x": 1}), ".decoder"),
        ({"dim": 8}, "lacks vocab_size"),
        ({"dim": "8", "vocab_size": 3}, ".dim: not of type integer"),
        ({"dim": 8, "vocab_size": 3, "extra": 1}, "extra is too much"),
    ],
)
def test_the_schema_refuses_what_is_wrong(data: dict[str, Any], fault: str) -> None:
    schema = af.TransformerSpec.json_schema()
    assert any(fault in found for found in faults(schema, data, schema))


def test_the_schema_takes_the_short_forms_of_files() -> None:
    """A kind as a bare name where it needs nothing else, and a cycle."""
    schema = af.TransformerSpec.json_schema()
    data = yaml.safe_load(gpt().to_yaml()) | {"final_norm": "rms_norm"}
    assert set(data["decoder"]) == {"cycle", "num_layers"}
    assert list(faults(schema, data, schema)) == []
    assert af.TransformerSpec.parse(data) == gpt()
    assert list(faults(schema, data | {"final_norm": "rms_nrom"}, schema)) == [".final_norm: none of anyOf"]
    bare = data["decoder"]["cycle"][0]["branches"][0] | {"op": "attention"}
    assert list(faults(schema["$defs"]["Branch"], bare, schema)), "an attention needs `num_heads`"


# -- parts of other packages ------------------------------------------------------------------------------------------


class Even(af.Pattern, kind="test_even"):
    """Every token sees the tokens at an even distance."""

    offset: int = 0

    def allows(self, q, k):
        return (q.pos - k.pos + self.offset) % 2 == 0


def test_an_outside_part_is_as_good_as_ours() -> None:
    mixer = af.Attention(2, pattern={"kind": "test_even", "offset": 2})
    assert mixer.pattern == Even(2)
    assert af.Attention.parse(mixer.to_dict()) == mixer
    assert af.Attention(2, pattern="test_even").pattern == Even()
    assert (Even() & af.Causal()).frontier() == 0
    assert "Even" in af.Pattern.json_schema()["$defs"]
    with pytest.raises(af.SpecError, match=r"known: .*test_even"):
        af.Pattern.parse("nothing")


def test_a_taken_kind_is_refused() -> None:
    with pytest.raises(af.SpecError, match=r"kind 'causal' is taken by anyformer\.parts\.pattern\.Causal"):

        class Mine(af.Pattern, kind="causal"):
            pass

    assert af.Pattern.parse("causal") == af.Causal()


def test_a_new_slot_has_kinds_of_its_own() -> None:
    class Colour(af.Part):
        pass

    class Red(Colour, kind="red"):
        depth: int = 3

    assert Colour.parse("red") == Red()
    assert set(Colour.choices()) == {"red"}
    assert "red" not in af.Norm.choices()
    with pytest.raises(af.SpecError, match="unknown kind of colour 'blue'; known: red"):
        Colour.parse("blue")
