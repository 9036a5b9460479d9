"""Pretraining of the nano base models: masked diffusion on an endless stream of the nano world (`tad.tasks.nano`)."""
