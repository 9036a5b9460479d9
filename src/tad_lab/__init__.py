"""The laboratory beside `tad`: matrices of methods and seeds (`tad study`), and bases trained from scratch on the nano world
(`tad pretrain`).

It imports `tad`; `tad` does not import it, and finds its commands and recipes through `tad_lab.plugin`.
"""
