"""One process of a training run: ``torchrun --nproc-per-node N -m steelyard.train plan.json --data PATH``.

`steelyard train` starts the processes of one host by itself (`steelyard.runtime.launch`).
"""

from steelyard.processes.allocator import set_allocator

set_allocator()  # before torch is imported

from steelyard.runtime.process import main  # noqa: E402

if __name__ == "__main__":
    main()
