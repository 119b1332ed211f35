"""Measures the device it runs on with torch; imports `specmodel`, never the other way round.

So far it names the device and the software beside it, which every measurement table has to
carry. The measurements themselves follow.
"""

from calibrate.environment import Environment, describe

__all__ = ["Environment", "describe"]
