"""Entry point that torchrun starts in every process: ``-m steelyard.profiler``."""

from steelyard.processes.allocator import set_allocator

set_allocator()  # as in training: memory that the allocator holds in addition to tensors is measured

from steelyard.profiler.launch import main  # noqa: E402

if __name__ == "__main__":
    main()
