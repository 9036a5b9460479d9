"""The code inside the sandbox: one process for the tests, one for the program, and what passes between them.

Values cross, objects do not. `start` limits and forks; `program` answers in the program's process; `trial` runs the tests in
the other one, with `stubs` for what the program defines and `shipping` for what the tests hand to it; `values` is the
closed encoding of all that comes back, on a `channel`. It imports only the standard library and is sent in compiled:
the package itself never imports it.
"""
