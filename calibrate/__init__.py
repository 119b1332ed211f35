"""Measures the device it runs on with torch; imports `specmodel`, never the other way round.

`environment` says what a measurement ran on, `cases` and `models` what can be measured, `plan` what
is, `clock` how it is timed, `bench` what cases share, `operators`, `passes` and `ranks` what runs,
`table` what is written, `run` the run within its budget, `peaks` and `profile` what follows from
it, `command` and `device_check` the two ways to start one. `engine` runs real checkpoints.
"""

from calibrate.environment import Environment, describe

__all__ = ["Environment", "describe"]
