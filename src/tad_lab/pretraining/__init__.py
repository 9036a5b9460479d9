"""Pretraining of the nano base models: objectives of `tad.training` on an endless stream of the nano world
(`tad.tasks.nano`)."""
