"""What the nano world, the world of the bundled models, adds to `tad`: it comes in as anybody's tasks do; see `tad.plugins`."""

TASKS = {
    "nano-word": "tad.tasks.nano.task:NanoWord",
    "nano-math": "tad.tasks.nano.task:NanoMath",
    "nano-code": "tad.tasks.nano.task:NanoCode",
}
