"""The code inside the sandbox: one process for the tests, one for the program, and what passes between them.

`start` limits and forks; `trial` runs the tests; `peer` carries calls and references over a `channel`; `values` says which
values cross, `proxies` what is believed of the other ones. It imports only the standard library and is sent in
compiled: the package itself never imports it.
"""
