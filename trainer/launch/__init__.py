"""Start the ranks of a run, watch them, and say in one line why they ended.

`start.run` begins every run. On one rank it calls the command here (`session.run_single`). For
several on this machine it becomes a light supervisor, without torch, that starts each rank as a
process (`rank.py`). Under torchrun or srun, every process that they started is a supervisor, of the
one rank that it was to be (`membership.py` reads which). Ranks find each other by a file here, else
by the launcher's address; then they agree on config and folder, and run the command
(`session.py`). Each notes its place in memory that its supervisor reads: a rank that hangs is
killed, and one that fails ends the others. As a rank ends it writes why; from all of that
the supervisor names the cause (`ends.py`), and under a launcher each prints how its own rank ended.
A run of our own ranks may then start again from its newest checkpoint (`supervise.py`).
"""
