"""Processes of one run on this host: started by torchrun, joined into a group, ended together, failures reported once.

| module    | idea                                                                             |
|-----------|----------------------------------------------------------------------------------|
| `start`   | starts the processes and waits; the error of the rank that failed first          |
| `agent`   | torchrun with exit codes as data: what `start` starts                            |
| `elastic` | the agent that goes on with what is left, and takes in what comes back           |
| `standing`| how far a run has come, for the agent and for processes that are started again   |
| `rank`    | runs the work of one process and reports how it failed                           |
| `group`   | joins and leaves the process group                                               |
| `failure` | how a process tells why it failed                                                |
| `parent`  | ends a process whose parent is gone                                              |
| `allocator` | how PyTorch's allocator is set on a GPU                                        |
"""
