"""Processes of one run on this host: started by torchrun, joined into a group, ended together, failures reported once.

| module      | idea                                                                             |
|-------------|----------------------------------------------------------------------------------|
| `start`     | starts the processes, waits, reports the error of the rank that failed first     |
| `agent`     | torchrun with exit codes as data; started by `start`                             |
| `elastic`   | torchrun agents: end or restart, continue with the remaining hosts and devices   |
| `stop`      | stops a run at a signal, after its state is saved                                |
| `rank`      | runs the work of one process, reports its failure, ends it with its parent       |
| `group`     | joins and leaves the process group                                               |
| `failure`   | files in which a process reports its failure and the progress of the run         |
| `allocator` | configuration of PyTorch's GPU allocator                                         |
"""
