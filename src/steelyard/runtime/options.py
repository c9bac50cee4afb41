"""Options of a training run, and their conversion to and from arguments of `python -m steelyard.train`."""

import argparse
import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_args

from steelyard.errors import UserError, nearest
from steelyard.hardware import DeviceType
from steelyard.limits import MOST_BYTES, MOST_STEPS
from steelyard.profiles.record import SLOW_SHARE
from steelyard.runtime.data.packing import STRATEGIES
from steelyard.runtime.data.prepare import TextOptions
from steelyard.runtime.data.rows import Rows

DATA_HELP = (
    "text, JSON lines, a folder of text, or token IDs (.npy, .bin); for image models a folder with a folder of images "
    "per class; for speech to text a folder with features.npy, tokens.npy; for your own module a safetensors file of "
    "tensors named as in its sample; for all models also synthetic"
)
MOST_SEED = 2**32 - 1
AUTO = "auto"
"""Value of ``--resume``: the latest checkpoint if there is one, otherwise a new run."""
RUN_OPTIONS = ("data", "lr", "steps", "warmup_steps", "schedule", "min_lr", "betas", "weight_decay", "max_grad_norm")
"""Options that a checkpoint stores, so that a resumed run needs permission to change them."""


CONSTANT = "constant"
LR_SCHEDULES = ("cosine", "linear", CONSTANT, "wsd")
TRACKERS = ("clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
"""Experiment trackers that accelerate supports without a logging folder, by package name."""
LEAST_LR_SHARE = 0.1
"""Default final learning rate, as a fraction of the peak."""


def parse_yes(text: str) -> bool:
    """Return whether ``text`` means yes. Raises ValueError if it means neither yes nor no."""
    values = {"yes": True, "true": True, "no": False, "false": False}
    return values[text.lower()] if text.lower() in values else bool(int(text))


def _option(
    default: Any,
    help_text: str,
    parser: Callable[[str], Any] = float,
    *,
    least: float | None = None,
    most: float = MOST_STEPS,
) -> Any:
    return field(default=default, metadata={"help": help_text, "parser": parser, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a training run, without the plan's decisions (batch, precision, pipeline schedule).

    Raises `UserError` that names an invalid option.
    """

    steps: int = _option(100, "training steps", int, least=1)
    lr: float = _option(3e-4, "peak learning rate", least=0, most=1e6)
    warmup_steps: int = _option(10, "steps over which the learning rate rises from zero", int, least=0)
    schedule: str = _option(
        "cosine",
        f"decay of the learning rate after the warm-up: {', '.join(LR_SCHEDULES)} (constant, and a last fifth that "
        "falls)",
        str,
    )
    min_lr: float | None = _option(None, "final learning rate; default: a tenth of --lr", least=0, most=1e6)
    betas: str = _option("0.9,0.95", "decay rates of the optimizer's two moments, each from 0 to below 1", str)
    optimizer: str | None = _option(None, "optimizer of the plan, to state it; another one is an error", str)
    weight_decay: float = _option(0.1, "weight decay of the optimizer", least=0, most=1e6)
    max_grad_norm: float = _option(1.0, "maximum global gradient norm; 0: no clipping", least=0, most=math.inf)
    seed: int = _option(0, "seed of initial weights and sample order", int, least=0, most=MOST_SEED)
    dataset: tuple[str, ...] = _option(
        (),
        "file, folder or ID that `datasets` reads, instead of --data: NAME, NAME@SPLIT or NAME@SPLIT:WEIGHT; repeat it "
        "for a mixture",
        str,
    )
    sft: bool = _option(
        False, "rows of --dataset have a prompt and a completion, or messages; only answers have a loss", parse_yes
    )
    packing: str | None = _option(
        None,
        f"packing of rows of --dataset into samples: {', '.join(STRATEGIES)}; default: a row of --sft is one sample, "
        "and texts are joined",
        str,
    )
    tokenizer: Path | None = _option(  # noqa: RUF009
        None, "file tokenizer.json or its folder; default: text is read as bytes, rows with the one of --init", Path
    )
    text_key: str = _option("text", "column of the text in JSON lines and other rows", str)
    max_data_bytes: int | None = _option(
        None, "maximum bytes of text to read from --data; default: all", int, least=1, most=MOST_BYTES
    )
    eval_data: Path | None = _option(None, "data for evaluation, in a format of --data or --dataset", Path)  # noqa: RUF009
    eval_every: int = _option(100, "steps between evaluations; the last step is also evaluated", int, least=1)
    mask_token: int | None = _option(None, "mask token ID, for masked-token training", int, least=0)
    checkpoint_dir: Path | None = _option(None, "folder for checkpoints; default: no checkpoints", Path)  # noqa: RUF009
    checkpoint_every: int = _option(100, "steps between checkpoints; the last step also writes one", int, least=1)
    keep_last: int = _option(2, "number of newest checkpoints to keep", int, least=1)
    resume: str = _option(
        AUTO,
        "checkpoint or folder of checkpoints to resume from; latest (of --checkpoint-dir); auto: latest, if any",
        str,
    )
    no_resume: bool = _option(False, "start from step 0 and move checkpoints of --checkpoint-dir aside", parse_yes)
    allow_change: str = _option(
        "", f"options that may differ from the checkpoint's run, among {', '.join(RUN_OPTIONS)}", str
    )
    keep_going: bool = _option(False, "continue after a loss that is not finite or explodes", parse_yes)
    elastic: bool = _option(
        False, "continue on remaining hosts and devices under a new plan; needs --checkpoint-dir", parse_yes
    )
    pool: str | None = _option(None, "device group of this host, for --elastic with several groups", str)
    init: Path | None = _option(None, "Hugging Face folder (safetensors) with initial weights", Path)  # noqa: RUF009
    export_hf: Path | None = _option(None, "new folder for final weights in Hugging Face format", Path)  # noqa: RUF009
    merge: bool = _option(False, "--export-hf merges adapters into the weights", parse_yes)
    builder: str | None = _option(None, "FILE.py:FUNCTION of the plan's own module; the file is run", str)
    device: str | None = _option(None, "device type, gpu or cpu, if it is not that of the plan", str)
    enforce_memory: bool = _option(False, "limit each process to the plan's memory budget", parse_yes)
    timeout_s: float = _option(600.0, "seconds to wait for other processes", least=1)
    slow_share: float = _option(
        SLOW_SHARE,
        "report ranks slower than predicted by this fraction, relative to the others; 0: none",
        least=0,
    )
    slow_steps: int = _option(20, "steps over which --slow-share takes the median", int, least=1)
    metrics: Path | None = _option(None, "file for one JSON line per step", Path)  # noqa: RUF009
    tensorboard: Path | None = _option(None, "folder for TensorBoard event files", Path)  # noqa: RUF009
    report_to: str = _option("", f"experiment trackers, among {', '.join(TRACKERS)}", str)
    record: Path | None = _option(None, "file for the run record", Path)  # noqa: RUF009

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", tuple(self.dataset))
        for option in fields(self):
            least, most, value = option.metadata["least"], option.metadata["most"], getattr(self, option.name)
            if least is not None and value is not None and not least <= value <= most:
                expected = f"{least} or more" + (f", at most {most:g}" if most < math.inf else "")
                raise UserError(field=flag(option), found=str(value), expected=expected, hint="correct the option")
        device_types = get_args(DeviceType)
        for name, given, known in (
            ("--schedule", [self.schedule], LR_SCHEDULES),
            ("--device", [] if self.device is None else [self.device], device_types),
            ("--packing", [] if self.packing is None else [self.packing], STRATEGIES),
            ("--allow-change", self.allowed_changes, RUN_OPTIONS),
            ("--report-to", self.trackers, TRACKERS),
        ):
            if unknown := [each for each in given if each not in known]:
                hint = nearest(unknown[0], known)
                raise UserError(field=name, found=repr(unknown[0]), expected=" or ".join(known), hint=hint)
        if self.min_lr is not None and (self.schedule == CONSTANT or self.min_lr > self.lr):
            raise UserError(
                field="--min-lr",
                found=f"{self.min_lr:g}, with --lr {self.lr:g} and --schedule {self.schedule}",
                expected="a schedule that decreases the learning rate",
                hint="leave --min-lr out, or choose another --schedule" if self.schedule == CONSTANT else "lower it",
            )
        if not all(0 <= beta < 1 for beta in self.beta_pair):
            raise _wrong_betas(self.betas)
        if (self.sft or self.packing) and (not self.dataset or self.max_data_bytes is not None):
            raise UserError(
                field="--sft" if self.sft else "--packing",
                found="--max-data-bytes" if self.dataset else "no --dataset",
                expected="whole rows with a prompt and a completion, with messages, or with text",
                hint="take a part as --dataset NAME@train[:1000]" if self.dataset else "add --dataset NAME",
            )

    @property
    def allowed_changes(self) -> list[str]:
        """Options whose values a resumed run may change."""
        return [name.strip().replace("-", "_") for name in self.allow_change.split(",") if name.strip()]

    @property
    def trackers(self) -> list[str]:
        """Package names of experiment trackers."""
        return [name.strip() for name in self.report_to.split(",") if name.strip()]

    @property
    def beta_pair(self) -> tuple[float, float]:
        """Decay rates of the optimizer's two moments. Raises `UserError` if they are not two numbers."""
        try:
            first, second = map(float, self.betas.split(","))
        except ValueError:
            raise _wrong_betas(self.betas) from None
        return first, second

    def source(self, data: str | Path | None) -> Path | Rows:
        """Return the training data. Raises `UserError` unless exactly one of ``data`` and ``--dataset`` is given."""
        if (data is None) != bool(self.dataset):
            raise UserError(
                field="--data",
                found="neither" if data is None else f"{data}, and --dataset {' '.join(self.dataset)}",
                expected="one of --data and --dataset",
                hint="pass text, token ids or images as --data, and rows and mixtures as --dataset",
            )
        return Path(data) if data is not None else Rows.parse(self.dataset)

    @property
    def eval_source(self) -> Path | Rows | None:
        """Evaluation data, in the form of the training data: a path, or rows if ``--dataset`` is given."""
        if self.eval_data is None or not self.dataset:
            return self.eval_data
        return Rows.parse([str(self.eval_data)])

    def of_run(self, data: str | Path | Rows) -> dict[str, str]:
        """Return the options that a checkpoint stores (`RUN_OPTIONS`), as text."""
        given = {name: getattr(self, name) for name in RUN_OPTIONS[1:]}
        given["min_lr"] = f"{LEAST_LR_SHARE:g} of lr" if self.min_lr is None else self.min_lr
        texts = {name: each if isinstance(each, str) else repr(float(each)) for name, each in given.items()}
        return {
            "data": str(data) if isinstance(data, Rows) else Path(data).name,
            **{name: text.removesuffix(".0") for name, text in texts.items()},
        }

    @property
    def least_lr(self) -> float:
        """Final learning rate."""
        if self.schedule == CONSTANT:
            return self.lr
        return LEAST_LR_SHARE * self.lr if self.min_lr is None else self.min_lr

    @property
    def text(self) -> TextOptions:
        """Options for tokenizing text."""
        reads_rows = self.sft or self.packing is not None
        own = self.init if reads_rows and self.init is not None and (self.init / "tokenizer.json").is_file() else None
        return TextOptions(
            completions_alone=self.sft,
            packing=self.packing,
            tokenizer=self.tokenizer or own,
            text_key=self.text_key,
            max_bytes=self.max_data_bytes,
            mask_token=self.mask_token,
        )

    def arguments(self) -> list[str]:
        """Return command-line arguments that a parser with `add_train_options` reads back to equal options."""
        given = ((flag(option), getattr(self, option.name)) for option in fields(self))
        values = ((name, each) for name, value in given for each in (value if isinstance(value, tuple) else [value]))
        return [part for name, value in values if value is not None for part in (name, str(value))]

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """Build options from the result of a parser that `add_train_options` prepared."""
        return cls(**{option.name: getattr(namespace, option.name) for option in fields(cls)})


def _wrong_betas(text: str) -> UserError:
    hint = "write for example --betas 0.9,0.95"
    return UserError(field="--betas", found=repr(text), expected="two numbers from 0 to below 1", hint=hint)


def flag(option: Field[Any]) -> str:
    """Return the name of an option on the command line."""
    return "--" + option.name.replace("_", "-")


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add every field of `TrainOptions` to a parser."""
    for option in fields(TrainOptions):
        default = "" if option.default in (None, ()) else f" (default {option.default})"
        parser.add_argument(
            flag(option),
            action="append" if option.default == () else "store",
            type=option.metadata["parser"],
            default=[] if option.default == () else option.default,
            help=option.metadata["help"] + default,
            metavar="YES|NO" if option.type is bool else option.metadata["parser"].__name__.upper(),
        )
