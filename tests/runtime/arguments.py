"""Training options from command-line arguments, without the rest of the command."""

import argparse
from collections.abc import Sequence

from steelyard.runtime.options import TrainOptions, add_train_options


def options_from(arguments: Sequence[str]) -> TrainOptions:
    """The options that command-line arguments give."""
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    return TrainOptions.from_namespace(parser.parse_args(arguments))
