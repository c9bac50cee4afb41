"""Processes of one run on this host: started by torchrun, joined into a group, ended together, failures reported once.

| module      | idea                                                                             |
|-------------|----------------------------------------------------------------------------------|
| `start`     | starts the processes and waits; the error of the rank that failed first          |
| `agent`     | torchrun with exit codes as data: what `start` starts                            |
| `elastic`   | the agents: ends for good or starts again, goes on with what is left             |
| `stop`      | how a signal stops a run, after its state is saved                               |
| `rank`      | runs the work of one process, reports how it failed, ends it with its parent     |
| `group`     | joins and leaves the process group                                               |
| `failure`   | how a process tells why it failed, and how far the run has come                  |
| `allocator` | how PyTorch's allocator is set on a GPU                                          |
"""
