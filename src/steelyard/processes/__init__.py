"""Processes of one run on this host: started by torchrun, joined into a group, ended together, failures reported once.

| module      | idea                                                                             |
|-------------|----------------------------------------------------------------------------------|
| `start`     | starts the processes and waits; the error of the rank that failed first          |
| `agent`     | torchrun with exit codes as data: what `start` starts                            |
| `elastic`   | the agents: end for good or restart, continue with the remaining devices         |
| `stop`      | how a signal stops a run, after its state is saved                               |
| `rank`      | runs the work of one process, reports how it failed, ends it with its parent     |
| `group`     | joins and leaves the process group                                               |
| `failure`   | reports of why a process failed, and of the run's progress                       |
| `allocator` | settings of PyTorch's allocator on a GPU                                         |
"""
