"""What a run writes beside its checkpoints is tried before its first step: a run takes days. Imports no torch."""

from pathlib import Path

from steelyard.errors import InvalidCheckpointError, UserError
from steelyard.output import check_file, check_folder
from steelyard.runtime.options import TrainOptions


def check_outputs(options: TrainOptions) -> None:
    """Raises `UserError` unless metrics, TensorBoard's files, record and weights can be written where they are to be.

    For the process that will write them.
    """
    if options.metrics is not None:
        check_file(options.metrics, "--metrics", makes_folder=True)
    if options.record is not None:
        check_file(options.record, "--record")
    if options.tensorboard is not None:
        check_tensorboard()
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


def check_tensorboard() -> None:
    """Raises `UserError` if TensorBoard is not installed."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise UserError(
            field="--tensorboard",
            found="no package tensorboard",
            expected="tensorboard, which writes the event files",
            hint="pip install tensorboard, or leave the option out (--metrics writes the same numbers)",
        ) from error
