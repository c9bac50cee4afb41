"""What torchrun starts in every process: ``-m steelyard.profiler``."""

from steelyard.processes.allocator import set_allocator

set_allocator()  # as training has it: what the allocator holds beside tensors is measured

from steelyard.profiler.launch import main  # noqa: E402

if __name__ == "__main__":
    main()
