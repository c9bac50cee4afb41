"""What torchrun starts in every process: ``-m steelyard.profiler``."""

from steelyard.profiler.run import main

if __name__ == "__main__":
    main()
