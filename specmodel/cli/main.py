"""``specmodel``: predict, compare, sweep, explain, fit, calibrate, measure, list, show."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from specmodel._version import __version__
from specmodel.errors import SpecmodelError

_FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="A table for people, or SI units for machines.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="specmodel")
def cli() -> None:
    """Does speculative decoding pay on this device, and with how many drafts?"""


def _setup_options(
    command: Callable[..., None], *, batch: str = "1,8,32,128"
) -> Callable[..., None]:
    """Add the options that describe a setup."""
    options: Sequence[tuple[str, dict[str, Any]]] = (
        ("--gpu", {"help": "Device: a name from `specmodel list gpus`."}),
        ("--profile", {"metavar": "FILE", "help": "Device: a YAML file in place of --gpu."}),
        ("--model", {"help": "Target: a name, a config.json, or a directory with one."}),
        ("--drafter", {"metavar": "KIND", "help": "One of `specmodel list drafters`."}),
        (
            "--draft",
            {"metavar": "MODEL", "help": "The draft model's or head's name or config.json."},
        ),
        ("--alpha", {"help": "Chance that a draft token is accepted, 0 to 1."}),
        ("--acceptance", {"metavar": "FILE", "help": "As `measure --format json` found it."}),
        ("--acceptance-rates", {"metavar": "A1,A2,..", "help": "Unconditional rate by position."}),
        ("--acceptance-length", {"metavar": "G", "help": "Mean tokens per round, bonus included."}),
        (
            "--workload",
            {"metavar": "KIND", "help": "Take acceptance published for chat, code, math, ..."},
        ),
        ("--acceptance-k", {"metavar": "N", "help": "The k that length was measured at [--k]."}),
        ("--hit-rate", {"help": "ngram: share of rounds that find a match."}),
        ("--layer-fraction", {"help": "self: share of the target's layers that draft."}),
        (
            "--kv-budget",
            {"metavar": "TOKENS", "help": "sparse-kv: tokens of KV a draft pass reads."},
        ),
        ("--k", {"metavar": "N|auto", "default": "auto", "help": "Draft tokens per round."}),
        ("--k-max", {"metavar": "N", "default": "16", "help": "Largest k that auto considers."}),
        (
            "--batch",
            {"metavar": "LIST", "default": batch, "help": "Such as 1,8,64 or 1-16."},
        ),
        ("--context", {"metavar": "LIST", "default": "2k", "help": "Tokens, 1k = 1,024."}),
        ("--tp", {"metavar": "N", "default": "1", "help": "Tensor-parallel degree."}),
        ("--dp", {"metavar": "N", "default": "1", "help": "Replicas that share the sequences."}),
        ("--pp", {"metavar": "N", "default": "1", "help": "Pipeline stages."}),
        ("--ep", {"is_flag": True, "help": "Spread whole experts over the tp x dp devices."}),
        (
            "--network",
            {"metavar": "US,GB/S", "help": "Between nodes: latency, a device's bandwidth."},
        ),
        ("--devices-per-node", {"metavar": "N", "default": "8", "help": "Joined without it."}),
        ("--draft-tp", {"metavar": "N", "help": "The drafter's own degree [--tp]."}),
        ("--draft-gpu", {"metavar": "NAME", "help": "The drafter's own device, needs --link."}),
        ("--link", {"metavar": "US,GB/S", "help": "Latency and bandwidth to it, such as 5,50."}),
        ("--overlap", {"is_flag": True, "help": "It drafts while the target verifies (a bound)."}),
        ("--offload", {"metavar": "SHARE", "default": "0", "help": "Weights streamed over PCIe."}),
        (
            "--engine",
            {
                "metavar": "NAME|FILE",
                "help": "Whose host time counts: see `specmodel list engines`.",
            },
        ),
        (
            "--price",
            {"metavar": "USD", "help": "Of one device for an hour."},
        ),
        ("--draft-price", {"metavar": "USD", "help": "Of one device of the drafter's [--price]."}),
        ("--dtype", {"help": "Activations, unquantised weights, KV [config.json's]."}),
        ("--weights", {"metavar": "DTYPE", "help": "Quantise the layers' weights."}),
        ("--kv-dtype", {"metavar": "DTYPE", "help": "KV cache [--dtype]."}),
        (
            "--kv-reread",
            {"metavar": "R", "help": "0: verify reads KV once, 1: per row [--engine's, or 0]."},
        ),
        (
            "--expert-overlap",
            {"metavar": "O", "default": "0", "help": "0: rows route independently."},
        ),
        (
            "--basis",
            {
                "type": click.Choice(["calibrated", "generic"]),
                "default": "calibrated",
                "help": "Measured numbers where the device has them, or generic ones throughout.",
            },
        ),
        (
            "--level",
            {
                "type": click.Choice(["operators", "ideal"]),
                "default": "operators",
                "help": "Sum of kernels, or the datasheet bound.",
            },
        ),
    )
    for flag, kwargs in reversed(options):
        command = click.option(flag, show_default="default" in kwargs, **kwargs)(command)
    return command


def _check_figure(plot: str | None) -> None:
    """Refuse a figure's file that could not be written, before any work."""
    if plot is not None:
        from specmodel.plots import check_file

        check_file(plot)


@cli.command()
@_setup_options
@_FORMAT
@click.option("--plot", metavar="FILE", help="Also write a figure (.png, .pdf, .svg).")
def predict(form: str, plot: str | None, **options: Any) -> None:
    """Predict times, regimes, speedup and the best k."""
    from specmodel.cli.output import write
    from specmodel.cli.render import prediction_text
    from specmodel.cli.setup import build
    from specmodel.report import predict as run

    _check_figure(plot)
    request = build(options)
    result = run(request.setup)
    text = prediction_text(request, result, form)
    if plot is not None:
        from specmodel.plots import prediction_figure, save

        save(prediction_figure(result), plot)
    write(text)


@cli.command()
@_setup_options
@click.option("--drafters", metavar="LIST", help="Kinds to compare [all that the model can have].")
@_FORMAT
@click.option("--plot", metavar="FILE", help="Also write a figure (.png, .pdf, .svg).")
def compare(drafters: str | None, form: str, plot: str | None, **options: Any) -> None:
    """Compare drafters on one setup: best k, speedup, memory, and the cheapest that is as good."""
    from specmodel.cli.compare import comparison_text, run_comparison
    from specmodel.cli.output import write

    _check_figure(plot)
    request, result = run_comparison(options, drafters)
    text = comparison_text(request, result, form)
    if plot is not None:
        from specmodel.plots import comparison_figure, save

        save(comparison_figure(result), plot)
    write(text)


@cli.command()
@_setup_options
@click.option("-o", "--output", required=True, metavar="FILE", help=".zarr, .nc, .parquet, .csv")
@click.option("--variables", metavar="LIST", help="Such as S,k_star,T_v [times, G, S, the best].")
@click.option("--workers", default="1", show_default=True, metavar="N", help="Local processes.")
@click.option("--cluster", metavar="ADDRESS", help="A Dask scheduler, such as tcp://host:8786.")
@click.option("--overwrite", is_flag=True, help="Replace a file, or a store that sweep wrote.")
def sweep(output: str, variables: str | None, **options: Any) -> None:
    """Evaluate every combination of lists into a file; the same command resumes it.

    A .csv file needs no further package, the others need those of specmodel[sweep]. Until the
    sweep ends, finished blocks are kept in the folder FILE.partial.

    Every option whose value is free text takes a list (those whose values have commas: separated
    by semicolons), alpha also FIRST:LAST:STEP. Options with several values become axes of the
    file. k runs over --k, or from 0 to --k-max.
    """
    from specmodel.cli.output import write
    from specmodel.cli.sweep import run_sweep

    how = {name: options.pop(name) for name in ("workers", "cluster", "overwrite")}
    write(run_sweep(options, output=output, variables=variables, **how))


@cli.command()
@partial(_setup_options, batch="1")
@click.option("--latex", is_flag=True, help="The formulas and their values, for a document.")
def explain(latex: bool, **options: Any) -> None:
    """Derive the answer step by step with your numbers in it, for one batch and one context."""
    from specmodel import explanation
    from specmodel.cli.output import prose, write
    from specmodel.cli.setup import build

    setup = build(options).setup
    write(explanation.latex(setup) if latex else prose(explanation.explain(setup)))


@cli.command("list")
@click.argument("what", type=click.Choice(["gpus", "models", "drafters", "engines"]))
@_FORMAT
def list_(what: str, form: str) -> None:
    """List the devices, models, drafters or serving engines that ship."""
    from specmodel.cli.output import write
    from specmodel.cli.records import listing_text

    write(listing_text(what, form))


@cli.command()
@click.argument("name", metavar="GPU|MODEL|FILE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "yaml"]),
    default="table",
    show_default=True,
    help="yaml: a file to edit, of a device for --profile, of a model for --model.",
)
def show(name: str, form: str) -> None:
    """Show one device or model: its numbers and where they come from."""
    from specmodel.cli.output import write
    from specmodel.cli.records import show_text

    write(show_text(name, form))


@cli.command()
@click.option(
    "--results", metavar="FILE", multiple=True, help="Published results (CSV) [those that ship]."
)
@click.option("--cases", metavar="FILE", multiple=True, help="User reports (YAML).")
@click.option("--max-median", metavar="SHARE", help="Exit 1 if a median error is larger.")
@click.option(
    "--each",
    type=click.Choice(["study", "deployment"]),
    default="study",
    show_default=True,
    help="What an engine's two own rows are taken of.",
)
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@click.option("--plot", metavar="FILE", help="Predicted against measured, .png, .pdf or .svg.")
@click.option("--report", metavar="FILE", help="Also write it as a page (.md).")
def validate(form: str, plot: str | None, **options: Any) -> None:
    """Predict measurements that others have published, and print how wrong that is.

    Given acceptance, S is the row's G over the predicted cost of a round. Of a series over
    batches the smallest tells the acceptance, and the others are predicted. An engine's host time
    is taken without the row's study but for its first plain and its first speculative row at batch
    1, which do not count.
    """
    from specmodel.cli.output import write
    from specmodel.cli.validating import run_validation

    text, passed = run_validation(options, form, plot)
    write(text)
    if not passed:
        click.get_current_context().exit(1)


@cli.command()
@click.argument("table", metavar="TABLE")
@click.option("-o", "--output", required=True, metavar="FILE", help="Device file to write (YAML).")
@click.option("--gpu", metavar="LABEL", help="Device [as the table names it].")
@click.option(
    "--engine",
    metavar="NAME",
    help="Published tables: vllm, sglang or trtllm. Rows of k, batch, tpot_ms: where to start.",
)
@click.option("--model", metavar="MODEL", help="Rows of k, batch, tpot_ms: their target.")
@click.option("--drafter", metavar="KIND", help="Their drafter.")
@click.option("--draft", metavar="MODEL", help="Its model or head.")
@click.option("--tp", metavar="N", default="1", help="Their tensor-parallel degree.")
@click.option("--context", metavar="N", default="2k", help="Their context.")
@click.option("--bandwidth", type=float, metavar="GB/S", help="Where no record has it.")
@click.option("--flops", type=float, metavar="TFLOP/S", help="Where no record has it.")
@click.option("--memory", type=float, metavar="GB", help="Where no record has it.")
@click.option("--l2", type=float, metavar="MB", help="Last-level cache, where no record has it.")
@click.option("--multiprocessors", type=int, metavar="N", help="Where no record has it.")
@click.option("--link-bandwidth", type=float, metavar="GB/S", help="Where no record has it.")
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@click.option("--plot", metavar="FILE", help="Also draw the residuals (.png, .pdf, .svg).")
@click.option("--overwrite", is_flag=True, help="Replace FILE where it exists.")
@click.option(
    "--accept-noise", is_flag=True, help="Fit a run that was too noisy too; the file says so."
)
def fit(table: str, output: str, form: str, plot: str | None, **options: Any) -> None:
    """Fit a measurement table (CSV, or a folder of published tables) and write a device file.

    The file works with --profile. Errors are of shapes left out of the fit. A table of your
    engine's own rates (columns k, batch, tpot_ms and acceptance_length; k = 0 is plain decoding)
    makes an engine file, for --engine: give --gpu, --model and --drafter as well.
    """
    from specmodel.cli.engines import fit_rates, rates_text

    options = {**options, "output": output, "plot": plot}
    if (rates := rates_text(table)) is not None:
        from specmodel.cli.output import write

        write(fit_rates(table, rates, form, options))
        return
    from specmodel.cli.fit import fit_text, run_fit
    from specmodel.cli.output import write
    from specmodel.hardware import write_device

    device, fitted, check = run_fit(table, options)
    text = fit_text(device, fitted, check, form)
    if plot is not None:
        from specmodel.plots import residual_figure, save

        save(residual_figure(fitted), plot)
    write_device(device, output, overwrite=options["overwrite"])
    write(text)


@cli.command()
@click.option("--device", metavar="cuda:N|cpu", default="cuda:0", show_default=True)
@click.option("-o", "--output", metavar="FILE", required=True, help="Profile to write (.yaml).")
@click.option(
    "--budget",
    metavar="TIME",
    default="60s",
    show_default=True,
    help="For measuring: 60s, 5m; more time measures more shapes.",
)
@click.option("--model", metavar="CONFIG", help="Measure this model's own shapes too.")
@click.option("--dtype", metavar="LIST", help="Such as bf16,fp8 [what the device is fast in].")
@click.option("--threads", metavar="N", help="Of the CPU [1 on a CPU: steadiest].")
@click.option("--table", metavar="FILE", help="Measurements, taken up again [OUTPUT.csv].")
@click.option("--seed", metavar="N", default="0", show_default=True, help="Order and values.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT where it exists.")
@click.option("--tiny", is_flag=True, hidden=True)
def calibrate(**options: Any) -> None:
    """Measure a device (needs torch) and write its profile."""
    from specmodel.cli.measuring import calibrate as run
    from specmodel.cli.output import write

    write(run(options))


@cli.command()
@click.option(
    "--target",
    metavar="DIR|GGUF",
    help="Your model; with --accept also a name or config.json [a small pair that ships].",
)
@click.option(
    "--draft",
    metavar="DIR|GGUF|KIND",
    help="Or ngram, lookahead, eagle, mtp, medusa, exit:N, layers:N,N,..., sparse:SINK,WINDOW.",
)
@click.option("--device", metavar="cuda:N|cpu", default="cuda:0", show_default=True)
@click.option("--dtype", metavar="DTYPE", help="Such as bf16 [what the device is fast in].")
@click.option("--k", metavar="LIST", help="Drafts of a round [4].")
@click.option("--tree", metavar="N,N,..", help="Instead of k: children at each depth.")
@click.option("--batch", metavar="LIST", default="1", show_default=True, help="Sequences.")
@click.option("--temperature", metavar="LIST", default="0", show_default=True)
@click.option("--top-k", metavar="N", help="Of target and drafter alike, as the next three.")
@click.option("--top-p", metavar="P")
@click.option("--min-p", metavar="P")
@click.option("--repetition-penalty", metavar="X", default="1", show_default=True)
@click.option("--accept", metavar="A1,A2,..", help="Impose conditional acceptance by position.")
@click.option("--prompts", metavar="FILE", help="One a line, or .jsonl [Python source text].")
@click.option("--requests", metavar="N", default="8", show_default=True, help="Prompts to take.")
@click.option("--context", metavar="N", default="128", show_default=True, help="Prompt tokens.")
@click.option("--max-new-tokens", metavar="N", default="64", show_default=True)
@click.option("--stop", metavar="TEXT", multiple=True, help="Ends a text; may be repeated.")
@click.option("--profile", metavar="FILE", help="Of this device [calibrates for a minute].")
@click.option("--seed", metavar="N", default="0", show_default=True)
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@click.option("--plot", metavar="FILE", help="T_p, T_v, T_d and S over k, .png, .pdf or .svg.")
def measure(form: str, **options: Any) -> None:
    """Decode speculatively, measured beside predicted (needs torch).

    Both models, the drafter's law and the sampler are real; every text is continued by
    --max-new-tokens, past end tokens. The prediction takes the measured acceptance and no time of
    the measured rounds.
    """
    from specmodel.cli.measuring import measure as run
    from specmodel.cli.output import write

    write(run(options, form))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit status 2."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(not _is_text(argument) for argument in given):
        return _fail("an argument holds bytes that are no UTF-8: rename the file")
    try:
        status = cli.main(args=arguments, prog_name="specmodel", standalone_mode=False)
        return status or 0  # what a command exits with
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        return _fail(error.format_message())
    except BrokenPipeError:  # the reader of our output has gone (``| head``)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (SpecmodelError, OSError) as error:
        return _fail(str(error))
    except click.Abort:
        return 130
    return 0


def _is_text(argument: str) -> bool:
    """Return whether a text can be written: names of files may hold any bytes."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fail(message: str) -> int:
    from specmodel.cli.output import visible

    click.echo(f"specmodel: {visible(' '.join(message.split()))}", err=True)
    return 2


def run() -> None:
    """Entry point of the installed command."""
    sys.exit(main())
