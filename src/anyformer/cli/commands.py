"""The command line. Each command reads its choices, calls the library, and prints; torch is imported only when used."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import click

from anyformer.cli.specs import spec_of

__all__ = ["main"]


class Sentences(click.Group):
    """Prints a mistake of the user's as one sentence, with exit code 2; a traceback only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            mistake = isinstance(error, (ValueError, OSError))
            said = str(error) if mistake else f"failed with {type(error).__name__}: {error} (see --debug)"
            click.echo(f"anyformer: {' '.join(said.split())}", err=True)
            ctx.exit(2 if mistake else 1)


@click.group(cls=Sentences, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="anyformer")
def cli(debug: bool) -> None:
    """One Transformer made of parts: build it, train it, run it, look inside it.

    MODEL is a preset (gpt-mini, llama-3-8b, ...), a spec in YAML or JSON, or what SOURCE is: the folder of a run or a
    published model, a .gguf file, or an id on the hub.
    """


SET = click.option(
    "--set", "settings", multiple=True, metavar="PATH=VALUE", help="Change the spec: decoder.*.mixer.position.base=1e6"
)


@cli.command()
@click.argument("model")
@click.option("--data", default="stdlib", show_default=True, help="A file, a folder, a glob, or stdlib.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run.  [default: runs/MODEL]")
@click.option("--steps", default=2000, show_default=True, help="Steps of the optimizer.")
@click.option("--seconds", type=float, help="Stop after so many seconds of training, if that comes first.")
@click.option("--batch-size", default=8, show_default=True, help="Windows a step.")
@click.option("--length", default=128, show_default=True, help="Tokens a window.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, or muon: fewer steps on small models.")
@click.option("--lr", type=float, help="Highest learning rate.  [default: 0.005 for adamw, 0.01 for muon]")
@click.option("--vocab", default="2048", show_default=True, help="Size of the tokenizer to train, or `bytes`.")
@click.option("--held-out", default=0.1, show_default=True, help="Share of the text that is kept for evaluation.")
@click.option("--evaluations", default=10, show_default=True, help="How often to measure on held-out text.")
@click.option("--prompt", default="", help="What samples begin with.  [default: a new document]")
@click.option("--seed", default=0, show_default=True, help="Of weights, split and order.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the model first (pays on runs of many minutes).")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@SET
def train(model: str, **choices: Any) -> None:
    """Train MODEL on text, and write weights, metrics, samples and loss.png into a folder."""
    from anyformer.cli.training import pretrain

    choices["out"] = choices["out"] or Path("runs") / Path(model).stem
    choices["vocab_size"] = _vocab(choices.pop("vocab"))
    pretrain(spec_of(model, choices.pop("settings")), **choices)


DTYPE = click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="[default: as stored]")


SAMPLING = [
    click.option("--temperature", default=1.0, show_default=True, help="0 always takes the likeliest token."),
    click.option("--top-k", default=0, help="Choose among the k likeliest tokens; 0 for all."),
    click.option("--top-p", default=1.0, help="Choose among the likeliest tokens that make up this share."),
    click.option("--min-p", default=0.0, help="Leave out tokens less likely than this share of the likeliest."),
    click.option("--typical-p", default=1.0, help="Choose among the most typical tokens that make up this share."),
    click.option("--repetition-penalty", default=1.0, help="Above 1: tokens that were seen become less likely."),
    click.option("--frequency-penalty", default=0.0, help="Taken from a token's logit each time it was made."),
    click.option("--presence-penalty", default=0.0, help="Taken from a token's logit once it was made."),
    click.option("--seed", type=int, help="Equal seeds give equal text."),
]


def sampled(command: Any) -> Any:
    """The options that say how tokens are chosen."""
    for option in reversed(SAMPLING):
        command = option(command)
    return command


QUANTIZE = click.option("--quantize", "bits", type=click.Choice(["int8", "int4"]), help="Round the weights first.")


@cli.command()
@click.argument("source")
@click.argument("prompt", default="")
@sampled
@click.option("--max-new-tokens", default=256, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--prefill-chunk", type=click.IntRange(1), help="Read a long prompt so many tokens at a time.")
@click.option("--num-beams", type=click.IntRange(1), help="Search for the likeliest texts, and print so many.")
@click.option("--draft", metavar="SOURCE|lookup", help="Guess ahead with a smaller model, or by looking back.")
@click.option("--choice", multiple=True, help="The new text is one of these; give it several times.")
@click.option("--regex", metavar="PATTERN", help="The new text matches this.")
@click.option("--json-schema", type=click.Path(path_type=Path), help="The new text is JSON that fits this file.")
@QUANTIZE
@DTYPE
def generate(
    source: str, prompt: str, choice: tuple[str, ...], regex: str | None, json_schema: Path | None, **choices: Any
) -> None:
    """Continue PROMPT with the model of SOURCE, as it is made; an encoder-decoder answers it.

    An empty prompt begins a new text.
    """
    from anyformer.cli.generating import asked
    from anyformer.cli.generating import generate as generate_text

    generate_text(source, prompt, constraint=asked(choice, regex, json_schema), **choices)


@cli.command()
@click.argument("source")
@click.option("--system", help="What the model is told first.")
@sampled
@click.option("--max-new-tokens", default=512, show_default=True, help="Tokens an answer.")
@click.option("--stop", multiple=True, help="End an answer before this text; may be given several times.")
@click.option("--load", type=click.Path(path_type=Path), help="Go on with a conversation that /save wrote.")
@QUANTIZE
@DTYPE
def chat(source: str, **choices: Any) -> None:
    """Talk with the model of SOURCE. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands."""
    from anyformer.cli.chatting import chat as talk

    talk(source, **choices)


@cli.command()
@click.argument("source")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--window", type=click.IntRange(1), help="Read the text in windows of so many tokens.")
@click.option("--stride", type=click.IntRange(1), help="Tokens from one window to the next.  [default: half a window]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--per-token", type=click.Path(path_type=Path), help="Write each token's log-probability here (TSV).")
@QUANTIZE
@DTYPE
def score(source: str, file: Path, **choices: Any) -> None:
    """Say how likely the model of SOURCE finds the text of FILE: perplexity and bits per byte."""
    from anyformer.cli.scoring import score as score_file

    score_file(source, file, **choices)


@cli.command()
@click.argument("model")
@click.option("--length", default=1024, show_default=True, help="Tokens a sequence that costs are counted for.")
@click.option("--batch-size", default=1, show_default=True, help="Sequences in a training batch.")
@click.option("--yaml", "form", flag_value="yaml", help="Print the spec as YAML, to edit and train.")
@click.option("--json", "form", flag_value="json", help="Print all figures as JSON.")
@click.option("--mask", type=click.IntRange(1), help="Draw who sees whom among so many tokens; the first is marked.")
@click.option("--blocks", type=click.IntRange(1), help="Draw --mask in tiles of so many tokens: empty, partial, full.")
@click.option("--png", type=click.Path(path_type=Path), help="Also write the drawing of --mask here.")
@SET
def show(model: str, settings: tuple[str, ...], **choices: Any) -> None:
    """Show MODEL as a tree with its cost: parameters, FLOPs, cache and training memory. No weights are made."""
    from anyformer.cli.showing import show as show_model

    show_model(spec_of(model, settings), **choices)


@cli.command()
@click.argument("target", required=False)
@click.option("--transformers", "theirs", metavar="PATH", help="A model of transformers, through its own forward.")
@click.option("--all", "everything", is_flag=True, help="Every legal combination of parts, as tiny models: minutes.")
@click.option("--cover", is_flag=True, help="With --all: only so many that every pair of parts meets once.")
@click.option("--only", metavar="LAW,LAW", help="These laws only; an unknown one names all.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the report here, as a page with pictures.")
@click.option("--seed", default=0, show_default=True, help="Of weights and texts.")
@click.option("--jobs", type=click.IntRange(1), help="Processes, for many models.  [default: one a core]")
@SET
def check(target: str | None, **choices: Any) -> None:
    """Hold TARGET to the laws of Transformers; the exit code is 1 if one is broken.

    TARGET is a MODEL, or a part of your own, as package.module:Name, which is tried in every legal combination.
    """
    from anyformer.cli.checking import check as check_target

    check_target(target, **choices)


@cli.command()
@click.argument("source")
@click.argument("text")
@click.option("--layer", default=0, show_default=True, help="Which layer; -1 is the last.")
@click.option("--head", type=int, help="Which head.  [default: the mean of all]")
@click.option("--rows", metavar="0,4,-1|3:8", help="Which tokens' looks to show.  [default: all]")
@click.option("--png", type=click.Path(path_type=Path), help="Also draw the heat map here.")
@DTYPE
def inspect(source: str, text: str, **choices: Any) -> None:
    """Show which tokens each token of TEXT looks at, in one layer of the model of SOURCE.

    Of an encoder-decoder, the encoder is shown.
    """
    from anyformer.cli.inspecting import inspect as inspect_model

    inspect_model(source, text, **choices)


@cli.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["hf", "gguf"]), required=True, help="A hub folder, or one GGUF file.")
@DTYPE
def convert(source: str, target: Path, form: str, dtype: str | None) -> None:
    """Write the model of SOURCE to TARGET in another form: for transformers (hf), or for llama.cpp (gguf)."""
    from anyformer.checkpoint.convert import convert as convert_model

    convert_model(source, target, form, dtype=dtype)
    click.echo(f"wrote {target}")


@cli.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["int8", "int4"]), default="int8", show_default=True)
@click.option("--text", type=click.Path(path_type=Path), help="What to measure on.  [default: a file of Python's own]")
@DTYPE
def quantize(source: str, target: Path, **choices: Any) -> None:
    """Round the weights of SOURCE to few bits, write the model to TARGET, and say what that costs."""
    from anyformer.cli.quantizing import quantize as quantize_model

    quantize_model(source, target, **choices)


def _vocab(choice: str) -> int | None:
    if choice == "bytes":
        return None
    if not choice.isdecimal():
        raise ValueError(f"--vocab must be a number or `bytes`, but is {choice!r}")
    return int(choice)


def main() -> None:
    """The console script."""
    gc.set_threshold(100_000)  # imports make hundreds of thousands of objects that stay: looking for garbage is wasted
    cli(prog_name="anyformer")


if __name__ == "__main__":
    main()
