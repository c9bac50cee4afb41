"""What a run writes beside its checkpoints, tried before its first step, since a run takes days. Imports no torch."""

from pathlib import Path

from steelyard.errors import InvalidCheckpointError, InvalidDataError, UserError
from steelyard.output import check_file, check_folder
from steelyard.runtime.options import TrainOptions

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What transformers reads beside a ``tokenizer.json``, where it is there."""


def tokenizer_files(path: Path | None) -> dict[str, bytes]:
    """The files of the tokenizer at ``path`` by the names that transformers knows them by; none for text as bytes.

    ``path`` is a ``tokenizer.json``, whatever its name, or the folder of one. Raises `InvalidDataError` where it cannot
    be read.
    """
    if path is None:
        return {}
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        beside = {name: file.with_name(name) for name in _BESIDE}
        found = {name: each.read_bytes() for name, each in beside.items() if each.is_file()}
        return {"tokenizer.json": file.read_bytes()} | found
    except OSError as error:
        raise InvalidDataError(
            field="tokenizer",
            found=f"{file}: {error.strerror}",
            expected="a tokenizer.json, or a folder that holds one",
            hint="check the path",
        ) from error


def check_outputs(options: TrainOptions) -> None:
    """Raises `UserError` unless metrics, TensorBoard's files, record and weights can be written where they are to be.

    For the process that will write them.
    """
    if options.metrics is not None:
        check_file(options.metrics, "--metrics", makes_folder=True)
    if options.record is not None:
        check_file(options.record, "--record")
    if options.tensorboard is not None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(
                field="--tensorboard",
                found="no package tensorboard",
                expected="tensorboard, which writes the event files",
                hint="pip install tensorboard, or leave the option out (--metrics writes the same numbers)",
            ) from error
        check_folder(options.tensorboard, "--tensorboard")
    if options.export_hf is not None:
        check_export(options.export_hf)


def check_export(path: Path) -> None:
    """Raises `UserError` if there is something at ``path``, or nothing can be."""
    if path.exists():
        raise InvalidCheckpointError(
            field="--export-hf",
            found=f"{path}, which exists",
            expected="the path of a new folder",
            hint="give another path, or move that one away",
        )
    check_folder(export_part(path), "--export-hf")


def export_part(path: Path) -> Path:
    """Where weights are written until they are complete."""
    return path.with_name(f".{path.name}.part")
